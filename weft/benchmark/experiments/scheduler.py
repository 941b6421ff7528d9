"""What a decision costs: scheduler, allocator and prefix cache alone, without model or device, over pools of any size.

Tokens are made up; a step is `schedule` and `update`. Every running request decodes, one token a step.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter

from weft import __version__
from weft.benchmark.experiments import ANYWHERE, Experiment
from weft.benchmark.measure import quantile
from weft.benchmark.options import option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row, Target
from weft.config import BlockGeometry, SchedulerConfig
from weft.errors import ConfigError
from weft.inference.policies import build_policy, find_policy
from weft.inference.prefix_cache import PrefixCache
from weft.inference.request import Request
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler
from weft.options import positive

_LOOKUP = Target(relation="<", value=1000.0)  # microseconds
_DECODE_STEP = Target(relation="<=", value=300.0)  # microseconds, of 256 running requests
_FLAT = Target(relation="<=", value=1.5)
_WARM_UP = 4  # steps before the measured ones
_ROUNDS = 8
_LONGEST_PROMPT = 2048  # tokens: more would only make the start slow


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    pools: str = option("1000,10000,100000,1000000", "blocks of each pool")
    block_size: int = option(16, "tokens of a block")
    running: int = option(256, "requests that run")
    waiting: int = option(4096, "requests that wait")
    steps: int = option(200, "measured steps of each kind, fewer where the pool is full before")
    lookup_tokens: int = option(8192, "tokens of the prefix looked up")
    policy: str = option("fcfs", "scheduling policy")
    seed: int = option(0, "of the made-up tokens")

    def __post_init__(self) -> None:
        positive(
            "SchedulerOptions",
            block_size=self.block_size,
            running=self.running,
            waiting=self.waiting,
            steps=self.steps,
            lookup_tokens=self.lookup_tokens,
        )
        for pool in self.pool_sizes:
            if pool < 2 * self.running:
                raise ConfigError(
                    f"a pool of {pool} blocks does not hold {self.running} requests that grow",
                    hint=f"{2 * self.running} blocks or more, or fewer running requests",
                )
        find_policy(self.policy)

    @property
    def pool_sizes(self) -> list[int]:
        try:
            return [int(pool) for pool in self.pools.split(",")]
        except ValueError as error:
            raise ConfigError(f"pools={self.pools!r} is no list of numbers", hint="1000,10000") from error


class Office:
    """A scheduler at work: `running` requests of `prompt_tokens` each in their places, `waiting` behind them."""

    def __init__(self, options: SchedulerOptions, num_blocks: int) -> None:
        # A request may fill its share of the pool; half of it, or what is long enough, is there at the start.
        share = num_blocks // options.running * options.block_size
        self.prompt_tokens = min(share // 2, _LONGEST_PROMPT)
        # Joining requests need a prompt's room while others grow: no step may have to preempt.
        self.steps = min(options.steps, (share - self.prompt_tokens) // 2 - _WARM_UP)
        self._numbers = count()
        self._token = count(options.seed)
        self._max_len = share + 1
        self.scheduler = _scheduler(options, num_blocks)
        for _ in range(options.running + options.waiting):
            self._add()
        while self.scheduler.num_waiting > options.waiting or not all(
            request.is_decoding for request in self.scheduler.running
        ):
            self.step()  # all prompts, chunk by chunk

    def step(self) -> float:
        """Seconds that the scheduler takes for one step in which every running request gains a token."""
        start = perf_counter()
        plan = self.scheduler.schedule()
        scheduled = perf_counter()
        assert not plan.preempted_ids, "the pool is too small for what is measured"
        tokens = [[next(self._token)] if rows else [] for rows in plan.num_logit_rows]
        sampled = perf_counter()
        self.scheduler.update(plan, tokens)
        return perf_counter() - sampled + scheduled - start

    def step_with_change(self) -> float:
        """The same where the request that runs longest leaves first, so that a waiting one joins, prompt and all."""
        leaving = self.scheduler.running[0].request_id
        start = perf_counter()
        self.scheduler.finish(leaving, "abort")
        return perf_counter() - start + self.step()

    def _add(self) -> None:
        name = str(next(self._numbers))
        self.scheduler.add(
            Request(
                request_id=name,
                token_ids=[next(self._token) for _ in range(self.prompt_tokens)],
                num_prompt_tokens=self.prompt_tokens,
                params=SamplingParams(temperature=0),
                seed=0,
                stop_token_ids=frozenset(),
                max_len=self._max_len,
            )
        )


def run(options: SchedulerOptions, progress: Progress) -> Iterator[Row]:
    """Plain steps, then steps with a change, on all pools by turns, so that a slow moment of the machine meets each."""
    advance = progress("pools", len(options.pool_sizes))
    offices = {}
    for pool in options.pool_sizes:
        offices[pool] = Office(options, pool)
        advance()
    for office in offices.values():
        for _ in range(_WARM_UP):
            office.step()
    plain = _by_turns(offices, Office.step, progress("decode steps", _ROUNDS))
    changed = _by_turns(offices, Office.step_with_change, progress("steps with a change", _ROUNDS))
    rows = []
    for pool, office in offices.items():
        row = Row(
            experiment="scheduler",
            case=f"{pool:,} blocks of {options.block_size}, {options.running} running, {options.waiting:,} waiting, "
            f"prompts of {office.prompt_tokens}",
            system=f"weft {options.policy}",
            system_version=__version__,
            seed=options.seed,
            notes="schedule and update with made-up tokens; prefix caching on",
        )
        for name, seconds in (("decode step", plain[pool]), ("step with one leaving, one joining", changed[pool])):
            for part, label in ((0.5, "median"), (0.99, "p99")):
                target = _DECODE_STEP if (name, part, options.running) == ("decode step", 0.5, 256) else None
                value = row.of(f"{name}, {label}", [quantile(seconds, part) * 1e6], "µs", target=target)
                rows.append(value.over(len(seconds)))
    steps = [row.value for row in rows if row.metric == "decode step, median"]
    ratio = max(steps) / min(steps)
    flat = replace(row, case="all pools").of("slowest decode step over fastest", [ratio], "x", target=_FLAT)
    yield from (*rows, flat, *_lookup(options))


def _by_turns(
    offices: Mapping[int, Office], step: Callable[[Office], float], advance: Callable[[], None]
) -> dict[int, list[float]]:
    """Seconds of each office's steps, some of each office in every round."""
    seconds: dict[int, list[float]] = {pool: [] for pool in offices}
    for turn in range(_ROUNDS):
        for pool, office in offices.items():
            share = office.steps * (turn + 1) // _ROUNDS - office.steps * turn // _ROUNDS
            seconds[pool] += [step(office) for _ in range(share)]
        advance()
    return seconds


def _lookup(options: SchedulerOptions) -> list[Row]:
    tokens = list(range(options.seed, options.seed + options.lookup_tokens))
    cache, size = PrefixCache(options.block_size), options.block_size
    parent: int | None = None
    for block in range(len(tokens) // size):
        parent = cache.publish(block, parent, tokens[block * size : (block + 1) * size])
    seconds = []
    for _ in range(options.steps):
        start = perf_counter()
        found = cache.lookup(tokens)
        seconds.append(perf_counter() - start)
        assert len(found) == len(tokens) // size, "a published prefix is found whole"
    row = Row(
        experiment="scheduler",
        case=f"prefix of {options.lookup_tokens:,} tokens, blocks of {size}",
        system="weft prefix cache",
        system_version=__version__,
        seed=options.seed,
    )
    return [
        row.of(f"lookup, {label}", [quantile(seconds, part) * 1e6], "µs", target=target).over(len(seconds))
        for part, label, target in ((0.5, "median", _LOOKUP), (0.99, "p99", None))
    ]


def _scheduler(options: SchedulerOptions, num_blocks: int) -> Scheduler:
    """The one place that knows how a scheduler is built."""
    config = SchedulerConfig(
        policy=options.policy, max_num_seqs=options.running, max_num_batched_tokens=max(8192, options.running)
    )
    geometry = BlockGeometry(num_blocks=num_blocks, block_size=options.block_size, shareable=True)
    return Scheduler(config, build_policy(config), geometry, prefix_caching=True)


EXPERIMENT = Experiment(
    summary="microseconds of a scheduling decision, without a device",
    examples=("scheduler", "scheduler --pools 100000 --running 64 --steps 1000 --json results/scheduler.jsonl"),
    options=SchedulerOptions,
    run=run,
    collected=ANYWHERE,
)
