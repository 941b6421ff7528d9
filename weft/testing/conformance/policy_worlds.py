"""Small worlds drawn by seed, in each of which a policy serves requests over the toy model; what it did wrong there.

The scheduler's own assertions, the toy model's (each token reads what was computed for it) and a watch on every call of
the policy all count. Plain Python.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

from weft.config import BlockGeometry, SchedulerConfig
from weft.inference.pipeline import Pipeline
from weft.inference.plan import StepPlan
from weft.inference.policies.interface import Policy, SchedulerView
from weft.inference.request import Request
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler
from weft.testing.conformance.suite import said
from weft.testing.toy import ToyExecutor, ToyHandle, sequential

NUM_WORLDS = 24
ENDS = "every request ends and says what it says alone"
PROGRESS = "somebody can run whenever a request is left"
ONCE = "a step names each request once"
PRESENT = "a step names nobody but those who run or wait"
UNTOUCHED = "requests are left as they are"
VICTIM = "who gives way is one of those who run"
LAWS = (ENDS, PROGRESS, ONCE, PRESENT, UNTOUCHED, VICTIM)

# Far more than the requests of any world have tokens to compute, preemptions included.
_MOST_STEPS = 1000
_STOP = frozenset({7, 11})
_FIELDS = tuple(entry.name for entry in fields(Request))


@dataclass
class World:
    """One seed's: a scheduler and the requests that come to it, each at its step."""

    seed: int
    config: SchedulerConfig
    geometry: BlockGeometry
    prefix_caching: bool
    overlap: bool
    arrivals: list[tuple[int, Request]] = field(default_factory=list)

    def __str__(self) -> str:
        options = self.config
        some = ", ".join(
            f"{request.request_id} at step {step} of {request.num_prompt_tokens} to {request.max_len} tokens, "
            f"priority {request.priority}, user {request.user}, deadline {request.ttft_deadline_s}"
            for step, request in self.arrivals
        )
        return (
            f"world {self.seed}: {self.geometry.num_blocks} blocks of {self.geometry.block_size}, "
            f"{options.max_num_seqs} rows, a budget of {options.max_num_batched_tokens}, chunks of "
            f"{options.max_chunk_tokens}, prefix caching {self.prefix_caching}, overlap {self.overlap}; {some}"
        )


def world_of(seed: int) -> World:
    """Few blocks, so that requests give way; few different tokens, so that prompts begin alike."""
    random = Random(seed)
    config = SchedulerConfig(
        max_num_seqs=random.randint(1, 4),
        max_num_batched_tokens=random.randint(4, 12),
        max_chunk_tokens=random.choice([None, 1, 3, 5]),
    )
    geometry = BlockGeometry(
        num_blocks=random.randint(2, 10), block_size=random.randint(1, 4), shareable=random.random() < 0.8
    )
    world = World(seed, config, geometry, prefix_caching=random.random() < 0.7, overlap=random.random() < 0.5)
    room = geometry.num_blocks * geometry.block_size
    for name in "abcdefgh"[: random.randint(2, 8)]:
        prompt = [random.randint(0, 1) for _ in range(random.randint(1, max(1, room // 2)))]
        step = random.choice([0, 0, random.randint(0, 12)])
        request = Request(
            request_id=name,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            params=SamplingParams(temperature=0),
            seed=0,
            stop_token_ids=_STOP,
            max_len=len(prompt) + random.randint(1, room - len(prompt) + 1),
            arrival_s=float(step),
            priority=random.randint(-2, 2),
            user=random.choice([None, "ann", "bob"]),
            ttft_deadline_s=random.choice([None, 1.0, 30.0]),
        )
        world.arrivals.append((step, request))
    world.arrivals.sort(key=lambda arrival: arrival[0])
    return world


class Watched(Policy):
    """A policy under watch: `wrong` says what it did that none may do, by law."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.wrong: dict[str, str] = {}
        self.num_named = 0

    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        named: list[Request] = []
        self.num_named = 0
        inner = iter(self._policy.candidates(view))
        while True:
            here = [*view.running, *view.waiting]
            request = self._untouched(here, "candidates", lambda: next(inner, None))
            if request is None:
                return
            if request in named and request.row is not None:  # without one it has given way since, and waits
                self.wrong.setdefault(ONCE, f"{request.request_id!r} is named again")
            if request not in here and request not in named:
                self.wrong.setdefault(PRESENT, f"{request.request_id!r} neither runs nor waits")
            named.append(request)
            self.num_named += 1
            yield request

    def admitted(self, request: Request) -> None:
        self._untouched([request], "admitted", lambda: self._policy.admitted(request))

    def victim(self, running: Sequence[Request]) -> Request:
        chosen: Request = self._untouched(running, "victim", lambda: self._policy.victim(running))
        if chosen not in running:
            self.wrong.setdefault(VICTIM, f"{chosen.request_id!r} is none of {[one.request_id for one in running]}")
        return chosen

    def _untouched(self, requests: Sequence[Request], where: str, call: Any) -> Any:
        before = [_state(request) for request in requests]
        result = call()
        for request, state in zip(requests, before, strict=True):
            for name, old, new in zip(_FIELDS, state, _state(request), strict=True):
                if old != new:
                    self.wrong.setdefault(UNTOUCHED, f"{where} makes {name}={old!r} of {request.request_id!r} {new!r}")
        return result


class _Runner:
    def __init__(self, block_size: int) -> None:
        self._executor = ToyExecutor(block_size)

    def execute(self, plan: StepPlan) -> ToyHandle:
        return self._executor.launch(plan)


def judge_world(kind: type[Policy], world: World) -> dict[str, str]:
    """What the policy did wrong in this world, by law."""
    watched: Watched | None = None
    said_by: dict[str, list[int]] = {}
    expected = {
        one.request_id: sequential(one.token_ids, one.max_len - one.num_prompt_tokens, _STOP)
        for _, one in world.arrivals
    }
    try:
        watched = Watched(kind(world.config))
        scheduler = Scheduler(world.config, watched, world.geometry, prefix_caching=world.prefix_caching)
        pipeline = Pipeline(scheduler, _Runner(world.geometry.block_size), overlap=world.overlap)
        arrivals = list(world.arrivals)
        for step in range(_MOST_STEPS):
            while arrivals and arrivals[0][0] <= step:
                _, request = arrivals.pop(0)
                said_by[request.request_id] = []
                scheduler.add(request)
            if not arrivals and not scheduler.has_requests:
                break
            for output in pipeline.step():
                said_by[output.request_id] += output.new_token_ids
        left = [one.request_id for one in (*scheduler.running, *scheduler.waiting)]
        assert not left, f"{left} have not ended after {_MOST_STEPS} steps"
        for name, tokens in expected.items():
            assert said_by[name] == tokens, f"{name!r} says {said_by[name]}, alone {tokens}"
    except Exception as error:
        wrong = {} if watched is None else watched.wrong
        nobody = watched is not None and watched.num_named == 0
        # A policy that has done something forbidden is convicted of that; what came of it is no second fault.
        return wrong or {PROGRESS if nobody else ENDS: said(error)}
    return watched.wrong


def _state(request: Request) -> list[Any]:
    return [value.copy() if isinstance(value := getattr(request, name), list) else value for name in _FIELDS]
