"""What a workload costs in steps, tokens and blocks: counts that neither machine nor noise moves, held exactly.

A fault that leaves every answer right and makes the engine do more for it shows here and in nothing else.
"""

from dataclasses import dataclass, field

from weft.inference.plan import StepPlan


@dataclass
class StepCounts:
    """Counts over one run; show it every plan, in order, with the blocks that requests own while the plan runs."""

    steps: int = 0
    scheduled_tokens: int = 0
    sampled_tokens: int = 0
    recomputed_tokens: int = 0  # computed before, and lost in a preemption
    prefix_hit_tokens: int = 0  # found in the cache at an admission
    preemptions: int = 0
    copied_blocks: int = 0
    peak_blocks: int = 0
    peak_requests: int = 0
    _computed: dict[str, int] = field(default_factory=dict)
    _most_computed: dict[str, int] = field(default_factory=dict)

    def see(self, plan: StepPlan, num_blocks_in_use: int) -> None:
        self.steps += 1
        self.preemptions += len(plan.preempted_ids)
        self.copied_blocks += len(plan.block_copies)
        self.peak_blocks = max(self.peak_blocks, num_blocks_in_use)
        self.peak_requests = max(self.peak_requests, len(plan.request_ids))
        admitted = {admission.row: admission.num_computed_tokens for admission in plan.admissions}
        self.prefix_hit_tokens += sum(admitted.values())
        for name, row, count in zip(plan.request_ids, plan.rows, plan.num_new_tokens, strict=True):
            start = admitted[row] if row in admitted else self._computed[name]
            most = self._most_computed.get(name, 0)
            self._computed[name] = end = start + count
            self._most_computed[name] = max(most, end)
            self.scheduled_tokens += count
            self.recomputed_tokens += max(min(most, end) - start, 0)
        self.sampled_tokens += sum(plan.num_logit_rows)

    @property
    def record(self) -> dict[str, int]:
        """The counts by name, as a snapshot holds them."""
        return {name: count for name, count in vars(self).items() if not name.startswith("_")}
