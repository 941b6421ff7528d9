"""All device work of a step: gather the batch, run the model, sample. Decides nothing."""

import logging
from collections.abc import Callable
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.attention.interface import Cache
from weft.batch import Batch, SamplingRows
from weft.config import BlockGeometry, Limits
from weft.inference.device_state import DeviceState
from weft.inference.plan import StepPlan
from weft.inference.sampler import Sampler
from weft.layers.operations import PlainOperations
from weft.models.family import Model

logger = logging.getLogger("weft")

# Called once a step with the float32 logits of its logit rows, in the plan's order, before sampling.
Observer = Callable[[StepPlan, Batch, Float[Tensor, "R V"]], None]


class StepHandle:
    """A step under way; its tokens may be read later than the next step starts."""

    def __init__(self, plan: StepPlan, sampled: Int[Tensor, "R"]) -> None:
        self._num_logit_rows = plan.num_logit_rows
        self._sampled = sampled

    def tokens(self) -> list[list[int]]:
        """For each request of the plan what it sampled, one token a logit row; -1: its logits were not finite."""
        sampled = self._sampled.tolist()
        ends = list(accumulate(self._num_logit_rows))
        return [sampled[end - count : end] for end, count in zip(ends, self._num_logit_rows, strict=True)]


class ModelRunner:
    """Owns the device state and the cache of one engine. `observe` sees logits; nothing else of weft does."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        sampler: Sampler,
        *,
        limits: Limits,
        geometry: BlockGeometry,
        device: torch.device,
        observe: Observer | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._state = DeviceState(limits, geometry, device)
        self._observe = observe

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepHandle:
        """Start the step."""
        self._state.apply(plan)
        if plan.block_copies:
            self._cache.copy_blocks(plan.block_copies)
        batch = self._state.gather(plan)
        ops = PlainOperations(self._cache.prepare(batch))
        hidden = self._model.forward(batch.token_ids, batch.positions, ops)
        logits = self._model.logits(hidden, batch.logit_rows, ops)
        if self._observe is not None:
            self._observe(plan, batch, logits)
        sampled = self._sample(logits, batch.sampling)
        self._state.commit(plan, batch.sequence_lengths, sampled)
        return StepHandle(plan, sampled)

    def _sample(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int[Tensor, "R"]:
        """A token for each row. If the sampler raises, row by row: only the row at fault gets -1."""
        if len(logits) == 0:  # chunks that stop short: a sampler need not know of them
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        try:
            return self._sampler(logits, rows)
        except Exception:
            if len(logits) == 1:
                logger.exception("sampling a token failed; its request ends with finish_reason 'error'")
                return torch.full((1,), -1, device=logits.device)
            # Noise is a function of (seed, position, token id), so a row says the same alone as beside others.
            return torch.cat([self._sample(logits[row : row + 1], rows.only(row)) for row in range(len(logits))])
