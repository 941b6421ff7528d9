"""The processors of all rows of a step joined, so that each kind runs once, however many rows ask for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.inference.processors import add_bias, allow_only, exclude_words, hold_back, penalise
from weft.inference.row_processing import RowProcessing


class ProcessedRow(NamedTuple):
    """A row of logits that is processed: its place among them, its row in the state, and what was asked for."""

    place: int
    row: int
    processing: RowProcessing


class TokensSoFar(NamedTuple):
    """What has been said, as the device has it: `lengths` tokens for each row of logits, `longest` at most."""

    token_ids: Int[Tensor, "rows S_max"]
    lengths: Int[Tensor, "R"]
    longest: int


Edit = Callable[[Float[Tensor, "R V"], TokensSoFar], None]


class StepProcessing:
    """The processors of the rows of one step; it serves any step of the same rows, whatever was said meanwhile."""

    def __init__(self, rows: Sequence[ProcessedRow], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        edits = (
            self._allowing(rows),
            self._words(rows),
            self._holding(rows),
            self._biasing(rows),
            self._penalties(rows),
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

    def _words(self, rows: Sequence[ProcessedRow]) -> Edit | None:
        words = [(row, last, first) for row in rows for last, first in row.processing.words]
        if not words:
            return None
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

    def _penalties(self, rows: Sequence[ProcessedRow]) -> Edit | None:
        rows = [row for row in rows if row.processing.is_penalised]
        if not rows:
            return None
        places, state_rows, prompt_lengths = (
            self._sent(torch.tensor(column))
            for column in zip(*((row.place, row.row, row.processing.prompt_length) for row in rows), strict=True)
        )
        repetition = self._penalty([row.processing.repetition for row in rows], nothing=1.0)
        frequency = self._penalty([row.processing.frequency for row in rows], nothing=0.0)
        presence = self._penalty([row.processing.presence for row in rows], nothing=0.0)
        # Where nobody is penalised for its prompt, prompts are not looked at, but for the one token that there must be.
        start = 0 if repetition is not None else min(row.processing.prompt_length for row in rows) - 1

        def edit(logits: Float[Tensor, "R V"], tokens: TokensSoFar) -> None:
            penalise(
                logits,
                places,
                tokens.token_ids[:, start : tokens.longest].index_select(0, state_rows),
                tokens.lengths[places] - start,
                prompt_lengths - start,
                repetition=repetition,
                frequency=frequency,
                presence=presence,
            )

        return edit

    def _penalty(self, values: list[float], *, nothing: float) -> Float[Tensor, "P"] | None:
        if all(value == nothing for value in values):
            return None
        return self._sent(torch.tensor(values, dtype=torch.float32))

    def _places(self, parts: Sequence[tuple[int, Int[Tensor, "_"]]]) -> Int[Tensor, "N"]:
        """Tokens of rows as indices into all logits."""
        return self._sent(torch.cat([token_ids + place * self._vocab_size for place, token_ids in parts]))

    def _sent(self, tensor: Tensor) -> Tensor:
        # Pinned, so that the copy waits for nobody; a simulated device has no host memory.
        pinned = self._device.type == "cuda" and torch.cuda.is_available()
        return (tensor.pin_memory() if pinned else tensor).to(self._device, non_blocking=True)
