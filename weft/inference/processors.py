"""What changes logits before a token is drawn, each a function of the logits and of the tokens so far alone.

All of them work in place on contiguous float32 logits [R, V], so that each touches no more than its own tokens, and
none reads a device back. `places` are indices into them flattened, `row * V + token`. Nothing is counted from step to
step: whatever a request has gone through, its tokens say all.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

EXCLUDED = -torch.inf


def allow_only(logits: Float[Tensor, "R V"], rows: Int[Tensor, "A"], places: Int[Tensor, "N"]) -> None:
    """Of these rows nothing but these places is left."""
    flat = logits.view(-1)
    allowed = flat[places]
    logits.index_fill_(0, rows, EXCLUDED)
    flat[places] = allowed


def exclude_words(
    logits: Float[Tensor, "R V"],
    places: Int[Tensor, "W"],
    beginnings: Int[Tensor, "W K"],
    token_ids: Int[Tensor, "rows S"],
    rows: Int[Tensor, "W"],
    lengths: Int[Tensor, "W"],
) -> None:
    """The last token of a word cannot be drawn where the tokens so far, prompt included, end in the word's others.

    places: of each word's last token.   beginnings: its other tokens, at the end of K, -1 before them.
    rows, lengths: the row of `token_ids` in which it would stand, and how many tokens that row has.
    """
    at = lengths[:, None] + torch.arange(-beginnings.shape[1], 0, device=logits.device)
    before = token_ids[rows[:, None], at.clamp(min=0)].masked_fill(at < 0, -2)  # -2: no token
    matches = ((before == beginnings) | (beginnings < 0)).all(dim=-1)
    # Added and not written: two words may end in the same token, and only one of them match.
    logits.view(-1).index_add_(0, places, torch.zeros_like(places, dtype=logits.dtype).masked_fill(matches, EXCLUDED))


def hold_back(
    logits: Float[Tensor, "R V"], places: Int[Tensor, "N"], least: Int[Tensor, "N"], lengths: Int[Tensor, "N"]
) -> None:
    """These places cannot be drawn where their row has fewer than `least` tokens, prompt included."""
    flat = logits.view(-1)
    flat[places] = flat[places].masked_fill(lengths < least, EXCLUDED)


def add_bias(logits: Float[Tensor, "R V"], places: Int[Tensor, "N"], biases: Float[Tensor, "N"]) -> None:
    """Add to these places, no two of which are the same."""
    flat = logits.view(-1)
    flat[places] = flat[places] + biases


def penalise_repetition(
    logits: Float[Tensor, "R V"], places: Int[Tensor, "P L"], penalties: Float[Tensor, "P 1"]
) -> None:
    """Divide positive logits, and multiply others, of tokens that are there: once, however often they are.

    places: of the tokens so far, a row for each row of logits that is penalised.
    """
    values = logits.take(places)
    values = torch.where(values > 0, values / penalties, values * penalties)
    logits.view(-1).scatter_(
        0, places.view(-1), values.view(-1)
    )  # equal places have equal values: it does not matter which comes last


def penalise_count(
    logits: Float[Tensor, "R V"],
    places: Int[Tensor, "P L"],
    counted: Float[Tensor, "P L"] | None,
    frequency: Float[Tensor, "P 1"] | None,
    presence: Float[Tensor, "P 1"] | None,
    zeros: Float[Tensor, "_ V"],
) -> None:
    """Take from logits `frequency` for each time that their token is there, and `presence` for any; None is neither.

    counted: 1 for a token that counts, 0 for one that does not; None: all do.
    zeros: to count in; zeros again afterwards.
    """
    if counted is None:
        counted = torch.ones_like(places, dtype=torch.float32)
    flat, sums, at = logits.view(-1), zeros.view(-1), places.view(-1)
    counts = sums.scatter_add_(0, at, counted.view(-1)).take(places)
    sums.scatter_(0, at, 0.0)
    values = logits.take(places)
    if frequency is not None:
        values = values - frequency * counts
    if presence is not None:
        values = values - presence * counts.clamp(max=1)
    flat.scatter_(0, at, values.view(-1))  # equal places have equal values here too
