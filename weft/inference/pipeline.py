"""The loop of an engine: plan, execute, read. With overlap a step is read when the next one has been launched.

Plain Python: knows neither what a step computes nor where it runs.

    no overlap   plan 1  execute 1  read 1  plan 2  execute 2  read 2
    overlap      plan 1  execute 1          plan 2  execute 2  read 1  plan 3  execute 3  read 2
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from weft.errors import RequestError
from weft.inference.plan import StepPlan
from weft.inference.request import FinishReason, Request
from weft.inference.scheduler import Scheduler
from weft.inference.step_output import StepOutput
from weft.inference.token_logprobs import StepLogprobs


@runtime_checkable
class Handle(Protocol):
    def tokens(self) -> Sequence[Sequence[int]]:
        """For each request of the plan what it sampled; waits for the step to end."""
        ...

    def logprobs(self) -> StepLogprobs | None:
        """Those that the plan's requests ask for, once their tokens were read; None if none does."""
        ...


@runtime_checkable
class Runner(Protocol):
    def execute(self, plan: StepPlan) -> Handle:
        """Launch a step; everything launched later happens on the device after it."""
        ...


class _Launched(NamedTuple):
    plan: StepPlan
    handle: Handle


class Pipeline:
    """Takes steps. overlap: plan and launch a step while the one before is under way."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: bool) -> None:
        self.overlap = overlap
        self._scheduler = scheduler
        self._runner = runner
        self._unread: _Launched | None = None  # at most one, and only with overlap
        self._is_stepping = self._is_planning = False  # in whose midst a policy, sampler or observer may call

    def step(self) -> list[StepOutput]:
        """What each request gained in the step that was read; nothing if none was, as in the first one with overlap.

        If it raises, every request is still there and the next step goes on from the tokens given out so far.
        """
        if not self._scheduler.has_requests:
            return []  # of a step that is still unread nobody wants a token: the next one to be read drops them
        try:
            self._is_stepping = True
            launched = self._launch()
            if self.overlap:
                launched, self._unread = self._unread, launched
            outputs = [] if launched is None else self._read(launched)
            self._is_stepping = False
        except BaseException:
            # Ahead of any call, where a second interrupt may come: the engine would refuse everything from then on.
            self._is_stepping = self._is_planning = False
            self._restart()
            raise
        if not self._scheduler.has_requests:
            self._scheduler.check_idle()
        return outputs

    def check_call(self, call: str, *, is_step: bool = False) -> None:
        """Whether the engine may be called so now: no step has room for another, and a plan in the making for nothing.

        Raises: RequestError.
        """
        if self._is_planning or (is_step and self._is_stepping):
            midst = "plans a step, by its policy" if self._is_planning else "takes a step, by its sampler or observer"
            raise RequestError(
                f"engine.{call} was called while the engine {midst} or in another thread",
                hint="call it between two steps, when engine.step() has returned",
            )

    def add(self, request: Request) -> None:
        """As of the scheduler. If it raises, interrupted, the request is there or it is not."""
        try:
            self._scheduler.add(request)
        except BaseException:
            self._restart()
            raise

    def finish(self, request_id: str, reason: FinishReason) -> StepOutput | None:
        """As of the scheduler. If it raises, interrupted, the request can be finished again."""
        try:
            return self._scheduler.finish(request_id, reason)
        except BaseException:
            self._restart()
            raise

    def _restart(self) -> None:
        self._unread = None
        self._scheduler.restart()

    def _read(self, launched: _Launched) -> list[StepOutput]:
        plan, handle = launched
        return self._scheduler.update(plan, handle.tokens(), handle.logprobs())

    def _launch(self) -> _Launched | None:
        """The next step, or None if nothing can be done before the one under way is read."""
        self._is_planning = True
        plan = self._scheduler.schedule()
        self._is_planning = False
        return _Launched(plan, self._runner.execute(plan)) if plan.request_ids else None
