"""Tier A: in float32 an engine says HuggingFace's tokens, ends as it ends, and chooses from the same logits.

Token equality alone misses real faults (an epsilon ten times too small flips no token in hundreds), so the logits of
every step are compared too. The tolerance is the reference's, never the engine's own error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from weft.testing.continuation import Continuation
from weft.testing.difference import Decode, where_logits_part, where_tokens_part

# HuggingFace against itself (one pass against token by token) differs by up to 1e-4 on SmolLM2 in float32;
# the faults planted in this repository's suites move logits by 1e-2 and more.
LOGIT_TOLERANCE = 1e-3

# A margin this wide cannot be crossed by float32 noise; fixed prompts of the suites keep it at every position.
SAFE_MARGIN = 1e-3

# Ties that a run may excuse: one in 1e5 to 1e6 positions is expected.
POSITIONS_PER_TIE = 100_000


class Verdict(Enum):
    EQUAL = "equal"
    TIE = "tie"
    DIFFERENT = "different"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One prompt: the engine against the reference.

    first_difference: the first place where tokens differ or one output ends, or None.
    max_logit_difference: over the steps that both took from the same tokens; logit_step: where it is.
    min_margin: of the reference, over its whole output.
    reason: in words, why this is not equal; None if it is.
    """

    verdict: Verdict
    num_tokens: int
    first_difference: int | None
    max_logit_difference: float
    logit_step: int
    min_margin: float
    reason: str | None


def compare_exact(
    reference: Continuation,
    actual: Continuation,
    *,
    noise: Callable[[], float],
    tolerance: float = LOGIT_TOLERANCE,
) -> Comparison:
    """Judge one continuation.

    noise: the reference's own logit noise on this prompt, measured only if a token differs: where its margin is under
        twice that, no engine could be asked to agree, and the difference is a tie.
    """
    place = first_difference(reference.token_ids, actual.token_ids)
    shared = min(len(reference.token_ids), len(actual.token_ids)) if place is None else place + 1
    shared = min(shared, len(reference.logits), len(actual.logits))
    gaps = (reference.logits[:shared] - actual.logits[:shared]).abs().amax(dim=-1)
    largest = float(gaps.max()) if shared else 0.0
    step = int(gaps.nan_to_num(nan=float("inf")).argmax()) if shared else 0
    reason: str | None
    if not largest <= tolerance:  # a NaN is not within any tolerance
        verdict, reason = Verdict.DIFFERENT, f"logits differ by {largest:.2g} at step {step} (at most {tolerance:g})"
    else:
        verdict, reason = compare_tokens(reference, actual.token_ids, actual.finish_reason, noise=noise)
    return Comparison(
        verdict=verdict,
        num_tokens=len(reference.token_ids),
        first_difference=place,
        max_logit_difference=largest,
        logit_step=step,
        min_margin=float(reference.margins.min()),
        reason=reason,
    )


def compare_tokens(
    reference: Continuation, token_ids: Sequence[int], finish_reason: str | None, *, noise: Callable[[], float]
) -> tuple[Verdict, str | None]:
    """Judge tokens and end alone, of an engine that shows no logits. Returns the verdict and, if not equal, why.

    finish_reason: None if the engine gives none.   noise: as of `compare_exact`.
    """
    place = first_difference(reference.token_ids, token_ids)
    if place is not None:
        return _judge_tokens(reference, token_ids, place, noise)
    if finish_reason is not None and finish_reason != reference.finish_reason:
        return Verdict.DIFFERENT, f"finish reason {finish_reason!r}, the reference's is {reference.finish_reason!r}"
    return Verdict.EQUAL, None


def assert_token_exact(
    references: Sequence[Continuation],
    answers: Sequence[Continuation],
    *,
    noise: Callable[[Continuation], float] | None = None,
    decode: Decode | None = None,
    record: Callable[[str, int], None] | None = None,
) -> list[Comparison]:
    """Fail unless every answer equals its reference: tokens, end, and the logits of each step.

    noise: the reference's own logit noise on a prompt (`own_noise`); where its margin is under twice that, a difference
        is a tie, excused up to `allowed_ties`. None excuses nothing: `assert_safe_margins` has passed the references.
    decode: token ids to text, for the report.
    record: told the number of positions, and of ties that were excused, by name.
    Raises: AssertionError with each prompt that differs: where, what stands around it, by how much.
    """
    measure = noise or _none
    comparisons = [
        compare_exact(reference, answer, noise=partial(measure, reference))
        for reference, answer in zip(references, answers, strict=True)
    ]
    num_positions = sum(comparison.num_tokens for comparison in comparisons)
    num_ties = sum(comparison.verdict is Verdict.TIE for comparison in comparisons)
    if record is not None:
        record("positions", num_positions)
        record("ties", num_ties)
    wrong = [index for index, comparison in enumerate(comparisons) if comparison.verdict is Verdict.DIFFERENT]
    reports = [
        f"prompt {index}: " + "\n  ".join(explain(references[index], answers[index], comparisons[index], decode))
        for index in wrong
    ]
    assert not wrong, f"not token-exact, {len(wrong)} of {len(comparisons)} prompts:\n" + "\n".join(reports)
    allowed = allowed_ties(num_positions)
    assert num_ties <= allowed, f"{num_ties} ties in {num_positions} positions, at most {allowed} are excused"
    return comparisons


def explain(
    reference: Continuation, actual: Continuation, comparison: Comparison, decode: Decode | None = None
) -> list[str]:
    """The report on one prompt, its first line first: why it is not equal, and what a reader would look for next."""
    lines = [comparison.reason or "equal"]
    place = comparison.first_difference
    if place is not None:
        lines.append(f"first difference: step {place} of {comparison.num_tokens}")
        lines += where_tokens_part(reference.token_ids, actual.token_ids, place, decode)
        if place < len(reference.token_ids):
            lines.append(f"margin of the reference there: {float(reference.margins[place]):.3g}")
    lines.append(f"smallest margin of the reference: {comparison.min_margin:.3g}")
    step = comparison.logit_step
    if min(len(reference.logits), len(actual.logits)) > step:
        gap = f"largest |Δlogit|: {comparison.max_logit_difference:.3g} at step {step}, "
        lines.append(gap + where_logits_part(reference.logits[step], actual.logits[step]))
    return lines


def assert_safe_margins(references: Sequence[Continuation]) -> None:
    """Fail if a reference's margin comes so near to noise that a fixed prompt could not be judged."""
    narrowest = min(float(reference.margins.min()) for reference in references)
    assert narrowest >= SAFE_MARGIN, f"a reference has a margin of {narrowest:.1e}: choose another seed or prompt"


def allowed_ties(num_positions: int) -> int:
    """How many ties a run over this many positions may excuse."""
    return 1 + num_positions // POSITIONS_PER_TIE


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place where the two part, or None: a proper prefix parts where it ends.

    >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference([1, 2], [1, 2, 3]), first_difference([1], [1])
    (2, 2, None)
    """
    pairs = zip(left, right, strict=False)  # unequal lengths are judged below
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if place is None and len(left) != len(right):
        return min(len(left), len(right))
    return place


def _none(reference: Continuation) -> float:
    return 0.0


def _judge_tokens(
    reference: Continuation, token_ids: Sequence[int], place: int, noise: Callable[[], float]
) -> tuple[Verdict, str]:
    ends = (len(reference.token_ids), len(token_ids))
    if place >= min(ends):
        return Verdict.DIFFERENT, f"{ends[1]} tokens, the reference has {ends[0]}"
    tokens = f"token {token_ids[place]}, the reference has {reference.token_ids[place]}"
    margin, measured = float(reference.margins[place]), noise()
    if margin < 2 * measured:
        return Verdict.TIE, f"{tokens}; its margin {margin:.2g} is under twice its own noise {measured:.2g}"
    return Verdict.DIFFERENT, f"{tokens}; its margin is {margin:.2g}, its own noise {measured:.2g}"
