"""A whole step as work on the device alone, from rows to sampled tokens: what is captured, or launched as it is.

Its only inputs are which rows take part and how many tokens each computes; everything else is gathered from the
device's state, and the sampled tokens go back into it. So a step in which nobody joins or leaves needs nothing from the
host, and what one step samples feeds the next without passing the host.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from weft.attention.interface import Cache
from weft.batch import Batch, GroupTables, SamplingRows, Truncation
from weft.config import Limits
from weft.inference.device_state import DeviceState
from weft.inference.plan import StepPlan
from weft.inference.sampler import Sampler
from weft.inference.step_sizes import StepSize
from weft.kernels.commit_step import commit_step
from weft.kernels.gather_step import gather_step
from weft.layers.operations import Attend, Operations
from weft.models.family import Model

LOG_ENTRIES = 4  # steps whose tokens can wait to be read; the engine reads one step behind


class StepProgram:
    """The step's inputs and its body. `logits` is what the last step computed, if it was built to keep them."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        sampler: Sampler,
        state: DeviceState,
        *,
        limits: Limits,
        operations: Callable[[Attend], Operations[Any]],
        keep_logits: int | None = None,
    ) -> None:
        """keep_logits: the vocabulary's size, to keep every step's logits for an observer."""
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._state = state
        self._operations = operations
        device, most = state.token_ids.device, limits.max_num_seqs
        self._scratch = most
        self._rows = torch.full((most,), most, dtype=torch.int64, device=device)
        self._query_starts = torch.zeros(most + 1, dtype=torch.int64, device=device)
        self._keeps = torch.zeros(most, dtype=torch.bool, device=device)
        self._one_each = torch.arange(most + 1, device=device)
        self._all_kept = torch.ones(most, dtype=torch.bool, device=device)
        self._written: dict[str, tuple[object, ...]] = {}
        # Kernels write tokens straight into memory of the host: no copy, and nothing for the host to wait for but them.
        self.token_log: Int[Tensor, "entries max_num_seqs"] = torch.zeros(
            LOG_ENTRIES, most, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        if keep_logits is not None:
            self.logits = torch.zeros(most, keep_logits, dtype=torch.float32, device=device)
        self._keeps_logits = keep_logits is not None

    @staticmethod
    def accepts(plan: StepPlan) -> bool:
        """Whether the plan is one that the program can run: at most one logit row a request, and none of prompts."""
        return max(plan.num_logit_rows) <= 1 and not plan.prompt_rows

    def set_inputs(self, plan: StepPlan, size: StepSize) -> None:
        """Say who takes part. Copies nothing that is there already."""
        padding = size.num_requests - len(plan.rows)
        self._write("rows", self._rows, (*plan.rows, *[self._scratch] * padding))
        if not size.is_decode:
            starts = tuple(accumulate(plan.num_new_tokens, initial=0))
            self._write("starts", self._query_starts, (*starts, *[starts[-1]] * padding))
            self._write("keeps", self._keeps, (*map(bool, plan.num_logit_rows), *[False] * padding))

    def run(self, size: StepSize) -> Float[Tensor, "R V"]:
        """Launch the step on the inputs that are set; the logits that it sampled from, a row a request."""
        count, device = size.num_requests, self._state.tensors
        rows = self._rows[:count]
        starts = (self._one_each if size.is_decode else self._query_starts)[: count + 1]
        step = gather_step(device, rows, starts, size.num_tokens)
        batch = Batch(
            token_ids=step.token_ids,
            positions=step.positions,
            sequence_lengths=step.sequence_lengths,
            query_starts=starts,
            groups=(GroupTables(block_tables=step.block_tables, slot_mapping=step.slots),),
            logit_rows=step.last_tokens,
            sampling=SamplingRows(
                temperatures=step.temperatures,
                seeds=step.seeds,
                positions=step.sequence_lengths,
                any_noise=True,
                truncation=Truncation(top_k=step.top_k, top_p=step.top_p, min_p=step.min_p) if size.truncates else None,
            ),
        )
        ops = self._operations(self._cache.prepare(batch))
        hidden = self._model.forward(batch.token_ids, batch.positions, ops)
        logits: Float[Tensor, "R V"] = self._model.logits(hidden, batch.logit_rows, ops)
        sampled = self._sampler(logits, batch.sampling)
        commit_step(device, rows, step.sequence_lengths, sampled, self._kept(size), self.token_log)
        if self._keeps_logits:
            self.logits[:count].copy_(logits)
        return logits

    def lengths(self, size: StepSize) -> Int[Tensor, "B"]:
        """Of the step that was run last: tokens of each request after it, which is where the one it sampled stands."""
        return self._state.num_computed_tokens[self._rows[: size.num_requests]]

    def sample_again(self, size: StepSize, logits: Float[Tensor, "R V"]) -> Int[Tensor, "R"]:
        """Sample the step that was run last from other logits; the tokens take the place of those sampled before."""
        rows, lengths = self._rows[: size.num_requests], self.lengths(size)
        sampled = self._sampler(logits, self.sampling(size))
        commit_step(self._state.tensors, rows, lengths, sampled, self._kept(size), self.token_log)
        return sampled

    def sampling(self, size: StepSize) -> SamplingRows:
        """What the step that was run last sampled by."""
        rows = self._rows[: size.num_requests]
        return self._state.sampling(rows, self.lengths(size), any_noise=True, truncates=size.truncates)

    def _kept(self, size: StepSize) -> Bool[Tensor, "B"]:
        """Whose sampled token is one."""
        return (self._all_kept if size.is_decode else self._keeps)[: size.num_requests]

    def _write(self, name: str, target: Tensor, values: Sequence[int]) -> None:
        written = tuple(values)
        if self._written.get(name) == written:
            return
        self._written.pop(name, None)
        pinned = torch.tensor(written, dtype=target.dtype, pin_memory=target.device.type == "cuda")
        target[: len(written)].copy_(pinned, non_blocking=True)
        self._written[name] = written
