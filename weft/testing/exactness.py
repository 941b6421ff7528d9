"""Tier A: in float32 an engine says HuggingFace's tokens, ends as it ends, and chooses from the same logits.

Token equality alone misses real faults (an epsilon ten times too small flips no token in hundreds), so the logits of
every step are compared too. The tolerance is the reference's, never the engine's own error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from weft.testing.continuation import Continuation

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
    max_logit_difference: over the steps that both took from the same tokens.
    min_margin: of the reference, over its whole output.
    reason: in words, why this is not equal; None if it is.
    """

    verdict: Verdict
    num_tokens: int
    first_difference: int | None
    max_logit_difference: float
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
    place = _first_difference(reference.token_ids, actual.token_ids)
    shared = min(len(reference.token_ids), len(actual.token_ids)) if place is None else place + 1
    shared = min(shared, len(reference.logits), len(actual.logits))
    gaps = (reference.logits[:shared] - actual.logits[:shared]).abs().amax(dim=-1)
    largest = float(gaps.max()) if shared else 0.0
    margins = reference.margins
    verdict, reason = Verdict.EQUAL, None
    if not largest <= tolerance:  # a NaN is not within any tolerance
        step = int(gaps.nan_to_num(nan=float("inf")).argmax())
        verdict, reason = Verdict.DIFFERENT, f"logits differ by {largest:.2g} at step {step} (at most {tolerance:g})"
    elif place is not None:
        verdict, reason = _judge_tokens(reference, actual, place, noise)
    elif reference.finish_reason != actual.finish_reason:
        verdict = Verdict.DIFFERENT
        reason = f"finish reason {actual.finish_reason!r}, the reference's is {reference.finish_reason!r}"
    return Comparison(
        verdict=verdict,
        num_tokens=len(reference.token_ids),
        first_difference=place,
        max_logit_difference=largest,
        min_margin=float(margins.min()),
        reason=reason,
    )


def assert_token_exact(references: Sequence[Continuation], answers: Sequence[Continuation]) -> None:
    """Fail unless every answer equals its reference, for references that `assert_safe_margins` has passed.

    Raises: AssertionError with each prompt that differs, where and by how much.
    """
    comparisons = [
        compare_exact(reference, answer, noise=lambda: 0.0)  # safe margins: no difference is a tie
        for reference, answer in zip(references, answers, strict=True)
    ]
    wrong = [f"prompt {i}: {c.reason}" for i, c in enumerate(comparisons) if c.verdict is not Verdict.EQUAL]
    assert not wrong, "not token-exact:\n" + "\n".join(wrong)


def assert_safe_margins(references: Sequence[Continuation]) -> None:
    """Fail if a reference's margin comes so near to noise that a fixed prompt could not be judged."""
    narrowest = min(float(reference.margins.min()) for reference in references)
    assert narrowest >= SAFE_MARGIN, f"a reference has a margin of {narrowest:.1e}: choose another seed or prompt"


def allowed_ties(num_positions: int) -> int:
    """How many ties a run over this many positions may excuse."""
    return 1 + num_positions // POSITIONS_PER_TIE


def _judge_tokens(
    reference: Continuation, actual: Continuation, place: int, noise: Callable[[], float]
) -> tuple[Verdict, str]:
    ends = (len(reference.token_ids), len(actual.token_ids))
    if place >= min(ends):
        return Verdict.DIFFERENT, f"{ends[1]} tokens, the reference has {ends[0]}"
    tokens = f"token {actual.token_ids[place]}, the reference has {reference.token_ids[place]}"
    margin, measured = float(reference.margins[place]), noise()
    if margin < 2 * measured:
        return Verdict.TIE, f"{tokens}; its margin {margin:.2g} is under twice its own noise {measured:.2g}"
    return Verdict.DIFFERENT, f"{tokens}; its margin is {margin:.2g}, its own noise {measured:.2g}"


def _first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """The first place where the two part, or None: a proper prefix parts where it ends.

    (1, 2, 3) and (1, 2, 4): 2;  (1, 2) and (1, 2, 3): 2;  (1, 2) and (1, 2): None
    """
    pairs = zip(left, right, strict=False)  # unequal lengths are judged below
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if place is None and len(left) != len(right):
        return min(len(left), len(right))
    return place
