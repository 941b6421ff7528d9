"""Tier C for an engine that shows tokens alone: every position of the reference judged, by as few requests as it takes.

An engine that cannot be forced is let run; where it leaves the reference, the choice is judged by the reference's own
noise, and it is started again from the reference's token. Between two flips its own decoding is what is judged.
"""

from collections.abc import Sequence

import torch

from weft.testing.continuation import Continuation
from weft.testing.exactness import first_difference
from weft.testing.near_ties import (
    NOISE_QUANTILE,
    Flip,
    allowed_flips,
    pair_noise,
    unit_in_last_place,
)
from weft.testing.trial import Trial


def judge_flips(trial: Trial) -> str:
    """How many positions flip, all of them within HuggingFace's noise.

    Raises: AssertionError if one lies beyond, or too many do.
    """
    references = trial.references
    again = [trial.reference.score(one.prompt_token_ids, one.token_ids) for one in references]
    noise = torch.cat([pair_noise(one.logits, other) for one, other in zip(references, again, strict=True)])
    tolerance = float(noise.quantile(NOISE_QUANTILE))
    own = sum(
        int((one.logits.argmax(dim=-1) != other.argmax(dim=-1)).sum())
        for one, other in zip(references, again, strict=True)
    )
    flips = _flips(trial, references)
    num_positions = sum(len(one.token_ids) for one in references)
    beyond = []
    for prompt, step, token in flips:
        row = references[prompt].logits[step]
        margin = float(row.max() - row[token])
        allowed = tolerance + float(unit_in_last_place(row.max()[None], trial.model.dtype))
        if not margin <= allowed:
            expected = references[prompt].token_ids[step]
            beyond.append(
                Flip(
                    prompt=prompt, position=step, token=token, reference_token=expected, margin=margin, allowed=allowed
                )
            )
    most = allowed_flips(own, num_positions, trial.model.dtype)
    counts = f"{len(flips)} of {num_positions} positions flip, at most {most}; HuggingFace against itself {own}"
    lines = [f"{len(beyond)} flips beyond HuggingFace's own noise of {tolerance:.3g}:", *map(str, beyond)]
    assert not beyond, "\n".join(lines)
    assert len(flips) <= most, counts
    return f"{counts}, all within its noise of {tolerance:.3g}; divergence not judged"


def _flips(trial: Trial, references: Sequence[Continuation]) -> list[tuple[int, int, int]]:
    """Prompt, step and token of each choice that is not the reference's."""
    found = []
    starts = dict.fromkeys(range(len(references)), 0)
    while starts:
        jobs = [
            trial.job(
                [*references[prompt].prompt_token_ids, *references[prompt].token_ids[:start]],
                len(references[prompt].token_ids) - start,
            )
            for prompt, start in starts.items()
        ]
        rest = {}
        for (prompt, start), answer in zip(starts.items(), trial.ask(jobs), strict=True):
            expected = references[prompt].token_ids[start:]
            assert answer.token_ids is not None
            place = first_difference(expected, answer.token_ids)
            if place is None:
                continue
            early = f"prompt {prompt} ends at step {start + place}, the reference at {len(expected) + start}"
            assert place < len(answer.token_ids), early
            found.append((prompt, start + place, answer.token_ids[place]))
            if place + 1 < len(expected):
                rest[prompt] = start + place + 1
        starts = rest
    return found
