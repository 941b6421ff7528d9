"""From the times of tokens to the numbers of a table: throughput, time to the first token, time between tokens.

Times are seconds since the workload arrived, all of it at once. Knows no system and reads no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import median

from weft.benchmark.row import Row, Target
from weft.benchmark.workload import Workload

THROUGHPUT = "output tokens"
FIRST_TOKEN = "time to first token p50"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one request was given: each token, and when the caller could have read it.

    entered_s: when it was handed over; later than 0 where a new request enters as one leaves.
    """

    token_ids: tuple[int, ...]
    times: tuple[float, ...]
    entered_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of a workload: an answer a job, in their order, and the seconds until the last was complete."""

    answers: tuple[Answer, ...]
    elapsed_s: float

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        return [answer.token_ids for answer in self.answers]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by wall time, prefill included."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.elapsed_s

    @property
    def first_token_s(self) -> list[float]:
        """Of each request the time to its first token, the wait for its turn included."""
        return [answer.times[0] - answer.entered_s for answer in self.answers]

    @property
    def between_tokens_s(self) -> list[float]:
        """Every gap between two tokens of one request."""
        return [after - before for answer in self.answers for before, after in pairwise(answer.times)]

    def is_complete(self, workload: Workload) -> bool:
        """Whether every request was given as many tokens as it asked for."""
        asked = [job.num_output_tokens for job in workload.jobs]
        return [len(answer.token_ids) for answer in self.answers] == asked


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of the values does not exceed (nearest rank).

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5), quantile([4.0, 1.0, 3.0, 2.0], 0.99)
    (2.0, 4.0)
    """
    return sorted(values)[max(ceil(part * len(values)), 1) - 1]


def spread(values: Sequence[float]) -> float | None:
    """Largest less smallest, as a part of the median; None for a single value, which has no spread."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 and median(values) else None


def rows_of(outcomes: Sequence[Outcome], row: Row) -> list[Row]:
    """The rows of one system over its repetitions, medians; `row` says what is common to them."""
    columns = _columns(outcomes)
    return [row.of(metric, values, unit, spread=spread(values)) for (metric, unit), values in columns.items()]


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The repetition that gave most tokens a second."""
    return max(outcomes, key=lambda outcome: outcome.tokens_per_second)


def best_rows_of(outcomes: Sequence[Outcome], row: Row, targets: Mapping[str, Target | None]) -> list[Row]:
    """As `rows_of`, but of the best repetition; all of them are in the spread. Targets by metric."""
    best, every = _columns([best_of(outcomes)]), _columns(outcomes)
    return [
        row.of(metric, best[metric, unit], unit, spread=spread(values), target=targets.get(metric)).over(len(values))
        for (metric, unit), values in every.items()
    ]


def _columns(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[float]]:
    """A value an outcome, by metric and unit."""
    columns: dict[tuple[str, str], list[float]] = {
        (THROUGHPUT, "tokens/s"): [outcome.tokens_per_second for outcome in outcomes],
        (FIRST_TOKEN, "ms"): [quantile(outcome.first_token_s, 0.5) * 1e3 for outcome in outcomes],
        ("time to first token p99", "ms"): [quantile(outcome.first_token_s, 0.99) * 1e3 for outcome in outcomes],
    }
    if all(outcome.between_tokens_s for outcome in outcomes):  # answers of one token have no gaps
        for name, part in (("p50", 0.5), ("p99", 0.99)):
            gaps = [quantile(outcome.between_tokens_s, part) * 1e3 for outcome in outcomes]
            columns[f"time between tokens {name}", "ms"] = gaps
    return columns
