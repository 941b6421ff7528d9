"""A scheduler of one policy and requests that all go on until their length, on a virtual clock. No model, no torch."""

from collections.abc import Sequence
from typing import Any

from weft.config import BlockGeometry, SchedulerConfig
from weft.inference.plan import StepPlan
from weft.inference.policies import build_policy
from weft.inference.policies.interface import Policy
from weft.inference.request import Request
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler

TOKEN = 3  # what every request says, always


class Desk:
    """policy: the name of one of weft's, or a class.   options: of SchedulerConfig.   now_s: set it as time goes by.

    first_steps: when each request computed its first token.
    """

    request: type[Request] = Request

    def __init__(
        self, policy: str | type[Policy], *, num_blocks: int = 1000, block_size: int = 4, **options: Any
    ) -> None:
        if isinstance(policy, str):
            config = SchedulerConfig(policy=policy, **options)
            built = build_policy(config)
        else:
            config = SchedulerConfig(**options)
            built = policy(config)
        geometry = BlockGeometry(num_blocks=num_blocks, block_size=block_size, shareable=True)
        self.scheduler = Scheduler(config, built, geometry, prefix_caching=True)
        self.now_s = 0.0
        self.first_steps: dict[str, int] = {}
        self._firsts: dict[str, int] = {}  # of a prompt by its length alone: its tokens, which nobody writes out
        self.steps = 0

    def add(self, request_id: str, prompt: int | Sequence[int] = 1, output: int = 1, **options: Any) -> None:
        """A request that comes now. prompt: its tokens, or how many; then no other prompt begins with them."""
        first = self._firsts.setdefault(request_id, 1000 + len(self._firsts))
        tokens = [first] * prompt if isinstance(prompt, int) else list(prompt)
        self.scheduler.add(
            self.request(
                request_id=request_id,
                token_ids=tokens,
                num_prompt_tokens=len(tokens),
                params=SamplingParams(),
                seed=0,
                stop_token_ids=frozenset(),
                max_len=len(tokens) + output,
                arrival_s=self.now_s,
                **options,
            )
        )

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for request_id in plan.request_ids:
            self.first_steps.setdefault(request_id, self.steps)
        self.steps += 1
        self.scheduler.update(plan, [[TOKEN] * rows for rows in plan.num_logit_rows])
        return plan

    def run(self) -> list[str]:
        """To the end; requests in the order in which they computed their first token."""
        while self.scheduler.has_requests:
            self.step()
        return sorted(self.first_steps, key=lambda name: self.first_steps[name])
