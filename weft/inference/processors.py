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


def penalise(
    logits: Float[Tensor, "R V"],
    rows: Int[Tensor, "P"],
    token_ids: Int[Tensor, "P L"],
    lengths: Int[Tensor, "P"],
    prompt_lengths: Int[Tensor, "P"],
    *,
    repetition: Float[Tensor, "P"] | None,
    frequency: Float[Tensor, "P"] | None,
    presence: Float[Tensor, "P"] | None,
) -> None:
    """Make tokens that have occurred less likely, or more: None is no penalty of the kind in any row.

    repetition: what a positive logit is divided by, and any other multiplied, if its token is in prompt or output.
    frequency, presence: what is taken from a logit for each occurrence of its token in the output, and for any.
    token_ids: of each of these rows, `lengths` of them, one at least; the first `prompt_lengths` are the prompt.
    """
    index = torch.arange(token_ids.shape[1], device=logits.device)
    # What is beyond a row's tokens counts as its first one, which is there already: equal places get equal values.
    token_ids = torch.where(index < lengths[:, None], token_ids, token_ids[:, :1])
    flat, places = logits.view(-1), token_ids + rows[:, None] * logits.shape[1]
    values = flat[places]
    if repetition is not None:
        values = torch.where(values > 0, values / repetition[:, None], values * repetition[:, None])
    if frequency is not None or presence is not None:
        is_output = (index >= prompt_lengths[:, None]) & (index < lengths[:, None])
        counts = torch.zeros(len(rows), logits.shape[1], dtype=logits.dtype, device=logits.device)
        counts = counts.scatter_add_(1, token_ids, is_output.to(logits.dtype)).gather(1, token_ids)
        if frequency is not None:
            values = values - frequency[:, None] * counts
        if presence is not None:
            values = values - presence[:, None] * (counts > 0)
    flat[places] = values
