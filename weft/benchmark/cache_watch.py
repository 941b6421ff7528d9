"""Watches how much of the pool of keys and values an engine holds, step by step, at the moment a step is executed."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from weft.attention.interface import AttentionSpec
from weft.benchmark.workload import Workload
from weft.inference.engine import Engine
from weft.inference.plan import StepPlan


class CacheWatch:
    """An observer of an engine that runs one workload, with requests named by their places.

    Two sources that share nothing: the blocks that the scheduler says are in use, and the tokens that the plans so far
    have given to requests which are not yet done.
    peak_blocks, peak_tokens, peak_requests: at the step that owned most blocks.
    """

    def __init__(self, workload: Workload) -> None:
        self.peak_blocks = self.peak_tokens = self.peak_requests = 0
        self._engine: Engine | None = None
        # The last token of an answer is never read back, so it is not cached.
        self._last = {str(place): job.num_tokens - 1 for place, job in enumerate(workload.jobs)}
        self._held: dict[str, int] = {}
        self._ending: set[str] = set()

    def attach(self, engine: Engine) -> None:
        """Look at this engine's allocator; an observer has to exist before its engine does."""
        self._engine = engine

    def __call__(self, plan: StepPlan, logits: Float[Tensor, "R V"]) -> None:
        for request_id in plan.preempted_ids:
            self._held.pop(request_id, None)
        cached = {admission.row: admission.num_computed_tokens for admission in plan.admissions}
        for request_id, row, count in zip(plan.request_ids, plan.rows, plan.num_new_tokens, strict=True):
            self._held[request_id] = cached.get(row, self._held.get(request_id, 0)) + count
        blocks = self._owned_blocks()
        if blocks > self.peak_blocks:
            self.peak_blocks = blocks
            self.peak_tokens = sum(self._held.values())
            self.peak_requests = len(self._held)
        ended = {request_id for request_id in plan.request_ids if self._held[request_id] >= self._last[request_id]}
        # With overlap they keep their blocks until their last token is read, after the next step is launched.
        for request_id in self._ending if self._overlaps() else ended:
            del self._held[request_id]
        self._ending = ended

    def _overlaps(self) -> bool:
        return self._engine is not None and self._engine.overlaps

    def _owned_blocks(self) -> int:
        assert self._engine is not None, "attach the engine before its first step"
        return self._engine._scheduler.num_blocks_in_use  # no public name of the engine shows it during a step


def bytes_per_token(specs: Sequence[AttentionSpec], *, itemsize: int) -> int:
    """A key and a value for each key-value head of each layer."""
    return sum(2 * spec.num_kv_heads * spec.head_dim * itemsize for spec in specs)
