"""The engine: token ids in, token ids out, one step at a time. Knows no text.

engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0))
while engine.has_unfinished_requests():
    for output in engine.step(): ...
"""

import logging
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import get_args

from weft.config import EngineConfig
from weft.errors import DuplicateRequestError, QueueFullError, RequestError, shown
from weft.inference.input_processor import InputProcessor, as_token_ids, check_request_options
from weft.inference.pipeline import Pipeline
from weft.inference.policies import build_policy
from weft.inference.request import FinishReason, Request
from weft.inference.runner import Observer
from weft.inference.sampler import Sampler
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler
from weft.inference.startup import start
from weft.inference.step_output import StepOutput
from weft.models.checkpoint.interface import Checkpoint

logger = logging.getLogger("weft")


class Engine:
    """Everything between token ids and tokens: scheduler, runner, model, cache.

    limits, geometry, vocab_size, eos_token_ids, placement: what was chosen when it was built; description: in words.
    startup_seconds: what its parts took.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        sampler: Sampler | None = None,
        observe: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        show_progress: bool = False,
    ) -> None:
        """Load the model and allocate the cache.

        sampler: replaces the sampler, for tests that force tokens.   observe: sees every step's logits.
        clock: seconds, by which policies order arrivals.
        Raises: ConfigError, CheckpointError and their kinds, before the weights are read where that is possible.
        """
        policy = build_policy(config.scheduler)
        ready = start(config, checkpoint, sampler=sampler, observe=observe, show_progress=show_progress)
        self.placement, self.limits, self.geometry = ready.placement, ready.limits, ready.geometry
        self.vocab_size, self.model, self.description = ready.vocab_size, ready.model, ready.description
        self.startup_seconds = ready.seconds
        # Some checkpoints end at ids that no token has (-1, or of a larger tokenizer): nothing can sample those.
        eos = checkpoint.generation.eos_token_ids
        self.eos_token_ids = tuple(token for token in eos if 0 <= token < self.vocab_size)
        self._inputs = InputProcessor(
            limits=self.limits,
            geometry=self.geometry,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            max_queued_tokens=config.scheduler.max_num_queued_tokens,
            max_logprob_entries=config.model.max_logprob_entries,
        )
        self._runner = ready.runner
        self._scheduler = Scheduler(
            config.scheduler, policy, self.geometry, prefix_caching=config.cache.enable_prefix_caching
        )
        self._pipeline = Pipeline(self._scheduler, self._runner, overlap=ready.overlap)
        self._clock = clock
        self._queue_limits = config.scheduler.max_num_queued_requests, config.scheduler.max_num_queued_tokens
        self._seeds = Random(config.model.seed)
        self._num_calls = 0
        logger.info("%s", self.description)

    @property
    def num_steps(self) -> dict[str, int]:
        """Steps so far by how they reached the device: see `ModelRunner.num_steps`."""
        return dict(self._runner.num_steps)

    @property
    def num_calls(self) -> int:
        """Requests added and steps taken so far: by it whoever drives the engine sees that somebody else does too."""
        return self._num_calls

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise the typed error that `add_request` would raise, and change nothing."""
        self._inputs.check(as_token_ids(prompt_token_ids), params)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        user: str | None = None,
        ttft_deadline_s: float | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Queue a request. Returns the seed of its noise: its own, or the one that was drawn for it.

        priority: smaller is sooner, for the policy priority.   user: whose share it is, for the policy fair.
        ttft_deadline_s: seconds from now to its first token, for the policy deadline.
        cache_salt: only requests of the same salt share cached prefixes.
        Raises: RequestError and its kinds, for a call by a policy too; the engine is then as it was.
        """
        self._pipeline.check_call(f"add_request({shown(request_id)})")
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {shown(request_id)}")
        if request_id in self._scheduler:
            raise DuplicateRequestError(f"request_id={request_id!r} is still in use")
        token_ids = as_token_ids(prompt_token_ids)
        self._inputs.check(token_ids, params)
        check_request_options(priority=priority, user=user, ttft_deadline_s=ttft_deadline_s, cache_salt=cache_salt)
        self._check_queue(len(token_ids))
        self._num_calls += 1
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        self._pipeline.add(
            Request(
                request_id=request_id,
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                params=params,
                seed=seed,
                stop_token_ids=self._inputs.stop_token_ids(params),
                max_len=self._inputs.max_len(len(token_ids), params),
                cache_salt=cache_salt,
                arrival_s=self._clock(),
                priority=priority,
                user=user,
                ttft_deadline_s=None if ttft_deadline_s is None else float(ttft_deadline_s),
            )
        )
        return seed

    @property
    def overlaps(self) -> bool:
        """Whether a step is planned while the one before runs, whose tokens then come one step late."""
        return self._pipeline.overlap

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.has_requests

    def step(self) -> list[StepOutput]:
        """One step of every request that the scheduler picks: what each gained, and whether it ended.

        With overlap these are the gains of the step before, which ran meanwhile; the first step gives nothing.
        If it raises, out of memory or interrupted, every request is still there and the next step goes on from the
        tokens given out so far; an interrupt while they are given out may take those of this step with it.
        Raises: RequestError for a call from within a step.
        """
        self._pipeline.check_call("step()", is_step=True)
        self._num_calls += 1
        return self._pipeline.step()

    def finish(self, request_id: str, reason: FinishReason, *, error: str | None = None) -> StepOutput | None:
        """End a request from outside, in any state; its memory is free at once.

        error: with the reason "error", why: a sentence for whoever asked.
        Returns its last output, or None if it has ended already or never was: finishing twice is finishing once.
        Raises: RequestError for a reason that is none, or a call by a policy. If interrupted, it can be called again.
        """
        if reason not in get_args(FinishReason):
            raise RequestError(f"unknown reason={shown(reason)}", hint="one of " + ", ".join(get_args(FinishReason)))
        if error is not None and (reason != "error" or not isinstance(error, str)):
            raise RequestError(f"error={shown(error)} says why an answer breaks off, and reason={shown(reason)}")
        self._pipeline.check_call(f"finish({shown(request_id)}, {reason!r})")
        output = self._pipeline.finish(request_id, reason)
        if output is None or reason != "error":
            return output
        return output._replace(error=error or "whoever drives the engine has ended it")

    def abort(self, request_id: str) -> StepOutput | None:
        """`finish` for a caller who no longer wants the answer."""
        return self.finish(request_id, "abort")

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens may wait now, as far as the limits of the queue go."""
        try:
            self._check_queue(num_tokens)
        except QueueFullError:
            return False
        return True

    def _check_queue(self, num_tokens: int) -> None:
        requests, tokens = self._queue_limits
        if requests is not None and self._scheduler.num_waiting >= requests:
            raise QueueFullError(
                f"{self._scheduler.num_waiting} requests wait, max_num_queued_requests={requests}",
                hint="try again when some have started, or raise max_num_queued_requests",
            )
        if tokens is not None and self._scheduler.num_waiting_tokens + num_tokens > tokens:
            raise QueueFullError(
                f"{self._scheduler.num_waiting_tokens} tokens wait and {num_tokens} more would exceed "
                f"max_num_queued_tokens={tokens}",
                hint="try again when some have started, or raise max_num_queued_tokens",
            )
