"""A workload is data: prompts as token ids, output lengths, and how many requests may be in flight. Pure, by seed.

Knows no system that runs it and no clock. Every request is there at time 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from weft.errors import ConfigError
from weft.options import positive


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Where lengths in tokens come from: each of `choices` as often, or uniform from `low` to `high`, both included.

    >>> str(Lengths.parse("8,32,128,512")), str(Lengths.parse("16:128")), str(Lengths.parse("64"))
    ('8,32,128,512', '16:128', '64')
    """

    choices: tuple[int, ...] = ()
    low: int = 0
    high: int = 0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """`8,32,128` (one of these), `16:128` (uniform) or `64`. Raises: ConfigError."""
        try:
            numbers = tuple(int(part) for part in text.replace(":", ",").split(","))
        except ValueError:
            numbers = ()
        is_range = ":" in text
        if not numbers or min(numbers) < 1 or (is_range and ("," in text or len(numbers) != 2)):
            raise ConfigError(f"{text!r} is no set of lengths", hint="8,32,128 (one of these), 16:128 (uniform) or 64")
        if not is_range:
            return cls(choices=numbers)
        if numbers[0] > numbers[1]:
            raise ConfigError(f"the lengths {text!r} begin above their end", hint=f"{numbers[1]}:{numbers[0]}")
        return cls(low=numbers[0], high=numbers[1])

    @property
    def longest(self) -> int:
        return max((*self.choices, self.high))

    def draw(self, random: Random, count: int) -> list[int]:
        """Choices are dealt a round at a time, so that no seed makes a workload of long prompts alone."""
        if not self.choices:
            return [random.randint(self.low, self.high) for _ in range(count)]
        rounds = range(-(-count // len(self.choices)))
        return [length for _ in rounds for length in random.sample(self.choices, len(self.choices))][:count]

    def __str__(self) -> str:
        return ",".join(map(str, self.choices)) if self.choices else f"{self.low}:{self.high}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request: its prompt, and how many tokens it is to answer, whatever they are (EOS does not end it)."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.num_output_tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Jobs in the order of arrival; a new one starts as one ends, so that at most `in_flight` run."""

    jobs: tuple[Job, ...]
    in_flight: int

    @property
    def num_output_tokens(self) -> int:
        return sum(job.num_output_tokens for job in self.jobs)

    @property
    def max_num_tokens(self) -> int:
        """Tokens of the longest job, answer included."""
        return max(job.num_tokens for job in self.jobs)

    @classmethod
    def together(cls, workloads: "Iterable[Workload]") -> "Workload":
        """One that needs as much room as the widest and the longest of them."""
        each = tuple(workloads)
        return cls(
            jobs=tuple(job for workload in each for job in workload.jobs),
            in_flight=max(workload.in_flight for workload in each),
        )

    def warm_up(self, num_output_tokens: int = 2) -> "Workload":
        """As many of its jobs as run at once, each with a short answer: the same widths, little time."""
        jobs = self.jobs[: self.in_flight]
        short = (replace(job, num_output_tokens=min(job.num_output_tokens, num_output_tokens)) for job in jobs)
        return Workload(jobs=tuple(short), in_flight=self.in_flight)


def mixed_workload(
    *, requests: int, in_flight: int, prompts: Lengths, outputs: Lengths, vocab_size: int, seed: int
) -> Workload:
    """Random token ids; lengths in an order that the seed decides."""
    positive("workload", requests=requests, in_flight=in_flight)
    # A source for each, so that a workload of more requests begins with the same ones.
    lengths = zip(
        prompts.draw(Random(f"{seed} prompts"), requests),
        outputs.draw(Random(f"{seed} outputs"), requests),
        strict=True,
    )
    random = Random(seed)
    jobs = [_job(random, prompt, output, vocab_size=vocab_size) for prompt, output in lengths]
    return Workload(jobs=tuple(jobs), in_flight=in_flight)


def skewed_workload(
    *, requests: int, in_flight: int, prompts: Lengths, short: int, long: int, one_in: int, vocab_size: int, seed: int
) -> Workload:
    """Exactly one request in `one_in` answers `long` tokens, all others `short`; which ones is drawn over all."""
    positive("workload", requests=requests, in_flight=in_flight, short=short, long=long, one_in=one_in)
    random = Random(seed)
    num_long = requests // one_in
    outputs = [long] * num_long + [short] * (requests - num_long)
    random.shuffle(outputs)
    lengths = zip(prompts.draw(Random(f"{seed} prompts"), requests), outputs, strict=True)
    jobs = [_job(random, prompt, output, vocab_size=vocab_size) for prompt, output in lengths]
    return Workload(jobs=tuple(jobs), in_flight=in_flight)


def num_equal(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> int:
    """How many requests were answered with the same tokens."""
    return sum(tuple(one) == tuple(other) for one, other in zip(left, right, strict=True))


def _job(random: Random, num_prompt_tokens: int, num_output_tokens: int, *, vocab_size: int) -> Job:
    prompt = tuple(random.randrange(vocab_size) for _ in range(num_prompt_tokens))
    return Job(prompt_token_ids=prompt, num_output_tokens=num_output_tokens)
