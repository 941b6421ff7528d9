"""Which running requests have processors, and their logits processed. Costs a step nothing in which nobody has one.

A plain copy of how many tokens such a request has is kept on the host, to know without asking the device how many there
are to look at; it is set anew whenever the request takes a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.inference.device_state import DeviceState
from weft.inference.plan import StepPlan
from weft.inference.processors import penalise_count, penalise_repetition
from weft.inference.row_processing import RowProcessing
from weft.inference.step_processing import ProcessedRow, StepProcessing, TokensSoFar


@dataclass(slots=True)
class _Running:
    processing: RowProcessing
    num_tokens: int


class Processing:
    """The requests with processors, by row of the device's state."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._running: dict[int, _Running] = {}
        self._joined: tuple[object, StepProcessing] | None = None  # of the last step, and what it was made for

    def apply(self, plan: StepPlan) -> None:
        """Take in who takes a row, and how far each comes in this step."""
        for admission in plan.admissions:
            self._joined = None
            processing = RowProcessing.of(admission)
            if processing is not None:
                self._running[admission.row] = _Running(processing, admission.num_computed_tokens)
            else:
                self._running.pop(admission.row, None)
        if self._running:
            for row, count in zip(plan.rows, plan.num_new_tokens, strict=True):
                if row in self._running:
                    self._running[row].num_tokens += count

    def concerns(self, plan: StepPlan) -> bool:
        """Whether any logits of this step are to be processed."""
        return bool(self._running) and any(
            count and row in self._running for row, count in zip(plan.rows, plan.num_logit_rows, strict=True)
        )

    def __call__(
        self,
        plan: StepPlan,
        logits: Float[Tensor, "R V"],
        lengths: Int[Tensor, "R"],
        *,
        row_each: bool,
        in_place: bool = False,
    ) -> Float[Tensor, "R V"]:
        """The logits in float32, processed: a copy, unless they may be processed `in_place`.

        lengths: how many tokens come before the one that a row samples.
        row_each: whether there is a row for each request of the plan, wanted or not, and perhaps more for padding.
        """
        made_for = (plan.rows, plan.num_logit_rows, row_each, logits.shape[1])
        if self._joined is None or self._joined[0] != made_for:
            rows = list(self._rows(plan, row_each=row_each))
            self._joined = made_for, StepProcessing(rows, logits.shape[1], logits.device)
        counts = [self._running[row].num_tokens for row in plan.rows if row in self._running]
        is_even = min(counts) == max(counts) and max(plan.num_logit_rows) == 1
        processed = logits.to(torch.float32, copy=not in_place, memory_format=torch.contiguous_format)
        self._joined[1](processed, TokensSoFar(self._state.token_ids, lengths, max(counts), is_even))
        return processed

    def _rows(self, plan: StepPlan, *, row_each: bool) -> Iterator[ProcessedRow]:
        place = 0
        for column, (row, count) in enumerate(zip(plan.rows, plan.num_logit_rows, strict=True)):
            if row in self._running:
                first = column if row_each else place
                for offset in range(count):
                    yield ProcessedRow(first + offset, row, self._running[row].processing)
            place += count


def rehearse(num_rows: int, vocab_size: int, num_tokens: int, device: torch.device) -> None:
    """Take as much memory as processing ever takes beside a step, and give it back: for who measures steps.

    num_tokens: of the longest request.
    """
    logits = torch.zeros(num_rows, vocab_size, device=device)
    places = torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=device)
    penalties = torch.ones(num_rows, 1, device=device)
    penalise_repetition(logits, places, penalties)
    penalise_count(
        logits, places, torch.ones_like(places, dtype=logits.dtype), penalties, penalties, torch.zeros_like(logits)
    )
