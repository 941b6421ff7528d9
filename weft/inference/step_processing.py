"""The processors of all rows of a step joined, so that each kind runs once, however many rows ask for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.inference.processors import (
    add_bias,
    allow_only,
    exclude_words,
    hold_back,
    penalise_count,
    penalise_repetition,
)
from weft.inference.row_processing import RowProcessing


class ProcessedRow(NamedTuple):
    """A row of logits that is processed: its place among them, its row in the state, and what was asked for."""

    place: int
    row: int
    processing: RowProcessing


class TokensSoFar(NamedTuple):
    """What has been said, as the device has it: `lengths` tokens for each row of logits.

    longest: of the rows that are processed, as the host knows it.   is_even: whether they are all as long.
    """

    token_ids: Int[Tensor, "rows S_max"]
    lengths: Int[Tensor, "R"]
    longest: int
    is_even: bool


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The tokens of some rows, of each from some place on.

    rows: of one alone a slice, which copies nothing.   offsets: where the logits of each begin.
    is_even: whether all start at the same place.
    """

    owners: Int[Tensor, "P"]
    rows: Int[Tensor, "P"] | slice
    offsets: Int[Tensor, "P 1"]
    starts: Int[Tensor, "P 1"]
    earliest: int
    is_even: bool

    def look(self, tokens: TokensSoFar) -> tuple[Int[Tensor, "P L"], Float[Tensor, "P L"] | None]:
        """Places of the tokens from the earliest start on, and 1 for each that is in the window of its row; None: all.

        Whatever is not gives way to the first of its row. That may not be in the window either, and counts as nothing.
        """
        token_ids = tokens.token_ids[self.rows, self.earliest : tokens.longest]
        if self.is_even and tokens.is_even:
            return token_ids + self.offsets, None
        at = torch.arange(self.earliest, tokens.longest, device=token_ids.device)
        inside = (at >= self.starts) & (at < tokens.lengths[self.owners, None])
        return torch.where(inside, token_ids, token_ids[:, :1]) + self.offsets, inside.to(torch.float32)


Edit = Callable[[Float[Tensor, "R V"], TokensSoFar], None]


class StepProcessing:
    """The processors of the rows of one step; it serves any step of the same rows, whatever was said meanwhile."""

    def __init__(self, rows: Sequence[ProcessedRow], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        edits = (
            self._allowing(rows),
            *self._words(rows),
            self._holding(rows),
            self._biasing(rows),
            self._repetition(rows),
            self._count(rows),
        )
        self._edits = [edit for edit in edits if edit is not None]

    def __call__(self, logits: Float[Tensor, "R V"], tokens: TokensSoFar) -> None:
        """Change contiguous float32 logits in place, in vLLM's order."""
        for edit in self._edits:
            edit(logits, tokens)

    def _allowing(self, rows: Sequence[ProcessedRow]) -> Edit | None:
        allowed = [(row.place, row.processing.allowed) for row in rows if row.processing.allowed is not None]
        if not allowed:
            return None
        whole = self._sent(torch.tensor([place for place, _ in allowed]))
        places = self._places(allowed)
        return lambda logits, tokens: allow_only(logits, whole, places)

    def _words(self, rows: Sequence[ProcessedRow]) -> list[Edit]:
        """Words of about one length together, or a long one would fill up thousands of short ones to its own."""
        words = [(row, last, first) for row in rows for last, first in row.processing.words]
        by_length = sorted(words, key=lambda word: _room(len(word[2])))
        groups = groupby(by_length, key=lambda word: _room(len(word[2])))
        return [self._words_alike(list(alike)) for _, alike in groups]

    def _words_alike(self, words: Sequence[tuple[ProcessedRow, int, tuple[int, ...]]]) -> Edit:
        longest = max(len(first) for _, _, first in words)
        beginnings = [[-1] * (longest - len(first)) + list(first) for _, _, first in words]
        places = self._sent(torch.tensor([row.place * self._vocab_size + last for row, last, _ in words]))
        padded = self._sent(torch.tensor(beginnings, dtype=torch.int64).view(len(words), longest))
        state_rows = self._sent(torch.tensor([row.row for row, _, _ in words]))
        owners = self._sent(torch.tensor([row.place for row, _, _ in words]))
        return lambda logits, tokens: exclude_words(
            logits, places, padded, tokens.token_ids, state_rows, tokens.lengths[owners]
        )

    def _holding(self, rows: Sequence[ProcessedRow]) -> Edit | None:
        rows = [row for row in rows if len(row.processing.held_back)]
        if not rows:
            return None
        places = self._places([(row.place, row.processing.held_back) for row in rows])
        each = [(row.place, row.processing.least_length) for row in rows for _ in row.processing.held_back]
        owners, least = (self._sent(torch.tensor(column)) for column in zip(*each, strict=True))
        return lambda logits, tokens: hold_back(logits, places, least, tokens.lengths[owners])

    def _biasing(self, rows: Sequence[ProcessedRow]) -> Edit | None:
        rows = [row for row in rows if len(row.processing.biased)]
        if not rows:
            return None
        places = self._places([(row.place, row.processing.biased) for row in rows])
        biases = self._sent(torch.cat([row.processing.biases for row in rows]))
        return lambda logits, tokens: add_bias(logits, places, biases)

    def _repetition(self, rows: Sequence[ProcessedRow]) -> Edit | None:
        """Over prompt and output."""
        rows = [row for row in rows if row.processing.repetition != 1.0]
        if not rows:
            return None
        window = self._window(rows, [0] * len(rows))
        penalties = self._sent(torch.tensor([row.processing.repetition for row in rows])[:, None])
        return lambda logits, tokens: penalise_repetition(logits, window.look(tokens)[0], penalties)

    def _count(self, rows: Sequence[ProcessedRow]) -> Edit | None:
        """Over the output alone."""
        rows = [row for row in rows if row.processing.frequency or row.processing.presence]
        if not rows:
            return None
        window = self._window(rows, [row.processing.prompt_length for row in rows])
        frequency = self._column([row.processing.frequency for row in rows])
        presence = self._column([row.processing.presence for row in rows])
        zeros = torch.zeros(max(row.place for row in rows) + 1, self._vocab_size, device=self._device)

        def edit(logits: Float[Tensor, "R V"], tokens: TokensSoFar) -> None:
            if tokens.longest > window.earliest:
                penalise_count(logits, *window.look(tokens), frequency, presence, zeros)

        return edit

    def _window(self, rows: Sequence[ProcessedRow], starts: Sequence[int]) -> _Window:
        owners, first = self._sent(torch.tensor([row.place for row in rows])), rows[0].row
        return _Window(
            owners=owners,
            rows=slice(first, first + 1) if len(rows) == 1 else self._sent(torch.tensor([row.row for row in rows])),
            offsets=owners[:, None] * self._vocab_size,
            starts=self._sent(torch.tensor(starts))[:, None],
            earliest=min(starts),
            is_even=min(starts) == max(starts),
        )

    def _column(self, penalties: Sequence[float]) -> Float[Tensor, "P 1"] | None:
        """None where nobody is penalised."""
        return self._sent(torch.tensor(penalties)[:, None]) if any(penalties) else None

    def _places(self, parts: Sequence[tuple[int, Int[Tensor, "_"]]]) -> Int[Tensor, "N"]:
        """Tokens of rows as indices into all logits."""
        return self._sent(torch.cat([token_ids + place * self._vocab_size for place, token_ids in parts]))

    def _sent(self, tensor: Tensor) -> Tensor:
        # Pinned, so that the copy waits for nobody; a simulated device has no host memory.
        pinned = self._device.type == "cuda" and torch.cuda.is_available()
        return (tensor.pin_memory() if pinned else tensor).to(self._device, non_blocking=True)


def _room(length: int) -> int:
    """Tokens that a word's beginning is given room for: sixteen, or up to twice as many as it has.

    >>> _room(0), _room(16), _room(17), _room(8400)
    (16, 16, 32, 16384)
    """
    return 16 if length <= 16 else 1 << (length - 1).bit_length()
