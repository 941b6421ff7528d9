"""The engine: token ids in, token ids out, one step at a time. Knows no text.

engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0))
while engine.has_unfinished_requests():
    for output in engine.step(): ...
"""

import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from random import Random
from typing import SupportsIndex

import torch

from weft.attention import PREFERRED, find_backend
from weft.attention.interface import AttentionBackend, AttentionSpec
from weft.config import BlockGeometry, CacheConfig, EngineConfig, Limits, is_duration
from weft.errors import (
    ConfigError,
    ContextLengthError,
    DuplicateRequestError,
    EmptyPromptError,
    QueueFullError,
    RequestError,
    SamplingParamsError,
    TokenOutOfRangeError,
)
from weft.inference.device_state import DeviceState
from weft.inference.placement import Placement, place
from weft.inference.policies import build_policy
from weft.inference.request import FinishReason, Request
from weft.inference.runner import ModelRunner, Observer
from weft.inference.sampler import GumbelSampler, Sampler
from weft.inference.sampling_params import SamplingParams
from weft.inference.scheduler import Scheduler, StepOutput
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.load import load_model, read_config, read_specs

logger = logging.getLogger("weft")

MAX_PRIORITY = 2**53  # whole numbers up to here are exact in a float, in which policies reckon


class Engine:
    """Everything between token ids and tokens: scheduler, runner, model, cache.

    limits, vocab_size, eos_token_ids, placement: what was chosen when it was built.
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
        self.placement = place(config.model, checkpoint.stored_dtype)
        model_config = read_config(checkpoint)
        self.limits = _limits(config, model_config.max_model_len)
        self.vocab_size: int = model_config.vocab_size
        self.eos_token_ids = checkpoint.generation.eos_token_ids
        specs = read_specs(checkpoint, dtype=self.placement.dtype)
        backend = _backend(config.cache.attention_backend, specs, self.placement)
        geometry = backend.geometry(self.limits, config.cache)
        bytes_per_block = backend.bytes_per_block(specs, geometry, self.placement.dtype)
        state = DeviceState.bytes_for(self.limits, geometry)
        self.geometry = _fit_memory(geometry, bytes_per_block, state, config.cache, self.placement.device)
        self.model = load_model(
            checkpoint,
            max_positions=self.limits.max_model_len,
            dtype=self.placement.dtype,
            device=self.placement.device,
            dummy_seed=config.model.seed if config.model.load_format == "dummy" else None,
            show_progress=show_progress,
            prepacked=self.placement.prepacked,
        )
        cache = backend.allocate(specs, self.geometry, self.placement.dtype, self.placement.device)
        self._runner = ModelRunner(
            self.model,
            cache,
            sampler or GumbelSampler(),
            limits=self.limits,
            geometry=self.geometry,
            device=self.placement.device,
            observe=observe,
        )
        self._scheduler = Scheduler(
            config.scheduler, policy, self.geometry, prefix_caching=config.cache.enable_prefix_caching
        )
        self._clock = clock
        self._queue_limits = config.scheduler.max_num_queued_requests, config.scheduler.max_num_queued_tokens
        self._seeds = Random(config.model.seed)
        self.description = (
            f"{checkpoint.config.get('model_type')} on {self.placement.device} in "
            f"{str(self.placement.dtype).removeprefix('torch.')} ({self.placement.reason}); "
            f"{'prepacked' if self.placement.prepacked else 'plain'} linear layers; "
            f"attention {backend.name}, cache {self.geometry.num_blocks * bytes_per_block / 2**20:.0f} MiB "
            f"({self.geometry.num_blocks} blocks of {self.geometry.block_size} tokens); "
            f"policy {config.scheduler.policy}; max_model_len {self.limits.max_model_len}"
        )
        logger.info("%s", self.description)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise the typed error that `add_request` would raise, and change nothing."""
        token_ids = as_token_ids(prompt_token_ids)
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(f"params must be SamplingParams, got {params!r}")
        if not token_ids:
            raise EmptyPromptError("the prompt has no tokens", hint="give at least one token, a BOS for instance")
        for index, token in enumerate(token_ids):
            if not 0 <= token < self.vocab_size:
                raise TokenOutOfRangeError(
                    f"prompt_token_ids[{index}]={token} is outside the vocabulary of {self.vocab_size} tokens"
                )
        if len(token_ids) >= self.limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for a new one in "
                f"max_model_len={self.limits.max_model_len}",
                hint="shorten the prompt or raise max_model_len",
            )
        longest = max(self._max_len(len(token_ids), params), len(token_ids) + 1)
        if self.geometry.blocks_for(longest - 1) > self.geometry.num_blocks:  # the last token is never read back
            raise ContextLengthError(
                f"the prompt of {len(token_ids)} tokens and max_tokens={params.max_tokens} make {longest} "
                f"tokens, and the pool holds {self.geometry.num_blocks * self.geometry.block_size}",
                hint="lower max_tokens or raise num_blocks",
            )
        for token in params.stop_token_ids:
            if token >= self.vocab_size:
                raise SamplingParamsError(
                    f"stop_token_ids holds {token}, outside the vocabulary of {self.vocab_size} tokens"
                )

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
    ) -> None:
        """Queue a request.

        priority: smaller is sooner, for the policy priority.   user: whose share it is, for the policy fair.
        ttft_deadline_s: seconds from now to its first token, for the policy deadline.
        cache_salt: only requests of the same salt share cached prefixes.
        Raises: RequestError and its kinds; the engine is then as it was.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._scheduler:
            raise DuplicateRequestError(f"request_id={request_id!r} is still in use")
        token_ids = as_token_ids(prompt_token_ids)
        self.validate(token_ids, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r}")
        if abs(priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority, a number of {priority.bit_length()} bits, is beyond what can be ordered",
                hint=f"a number from -{MAX_PRIORITY} to {MAX_PRIORITY}",
            )
        if ttft_deadline_s is not None and not is_duration(ttft_deadline_s):
            raise RequestError(f"ttft_deadline_s must be a number of seconds above 0, got {ttft_deadline_s!r}")
        for name, text in (("user", user), ("cache_salt", cache_salt)):
            if text is not None and not isinstance(text, str):
                raise RequestError(f"{name} must be a string or None, got {text!r}")
        self._check_queue(len(token_ids))
        eos = () if params.ignore_eos else self.eos_token_ids
        self._scheduler.add(
            Request(
                request_id=request_id,
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                params=params,
                seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
                stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
                max_len=self._max_len(len(token_ids), params),
                cache_salt=cache_salt,
                arrival_s=self._clock(),
                priority=priority,
                user=user,
                ttft_deadline_s=None if ttft_deadline_s is None else float(ttft_deadline_s),
            )
        )

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.has_requests

    def step(self) -> list[StepOutput]:
        """One step of every request that the scheduler picks: what each gained, and whether it ended.

        If it raises, out of memory or interrupted, every request is still there and the next step goes on from the
        tokens given out so far.
        """
        if not self._scheduler.has_requests:
            return []
        try:
            plan = self._scheduler.schedule()
            outputs = self._scheduler.update(plan, self._runner.execute(plan).tokens())
        except BaseException:
            self._scheduler.restart()
            raise
        if not self._scheduler.has_requests:
            self._scheduler.check_idle()
        return outputs

    def finish(self, request_id: str, reason: FinishReason) -> StepOutput | None:
        """End a request from outside, in any state; its memory is free at once.

        Returns its last output, or None if it has ended already or never was: finishing twice is finishing once.
        """
        return self._scheduler.finish(request_id, reason)

    def abort(self, request_id: str) -> StepOutput | None:
        """`finish` for a caller who no longer wants the answer."""
        return self.finish(request_id, "abort")

    def _max_len(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Total tokens at which a request ends by length: asked for, or as many as context and pool hold."""
        room = self.limits.max_model_len
        if params.max_tokens is None:
            return min(room, self.geometry.num_blocks * self.geometry.block_size + 1)
        return min(room, num_prompt_tokens + params.max_tokens)

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


def as_token_ids(prompt: Iterable[object]) -> list[int]:
    """Plain integers from whatever holds integers (NumPy's and torch's too). Raises: RequestError."""
    # A tensor without an axis calls itself iterable.
    if (
        isinstance(prompt, str | bytes | Mapping | Set)
        or not isinstance(prompt, Iterable)
        or getattr(prompt, "ndim", 1) == 0
    ):
        raise RequestError(f"prompt_token_ids must be a list of token ids, got {prompt!r}")
    token_ids = []
    for index, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, SupportsIndex):
            raise RequestError(f"prompt_token_ids[{index}] must be an integer, got {token!r}")
        try:
            token_ids.append(operator.index(token))
        except TypeError as error:  # a tensor of several elements, or of floats
            raise RequestError(f"prompt_token_ids[{index}] must be an integer, got {token!r}") from error
    return token_ids


def _limits(config: EngineConfig, model_limit: int) -> Limits:
    asked = config.model.max_model_len
    if asked == 1:
        raise ConfigError("max_model_len=1 holds a prompt of one token and no answer", hint="2 or more")
    if asked is not None and asked > model_limit:
        raise ConfigError(
            f"max_model_len={asked} exceeds the {model_limit} positions that the model declares",
            hint="positions beyond were never trained, and a dynamic rope scaling there would depend on history",
        )
    return Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=asked or model_limit,
    )


def _backend(name: str, specs: Sequence[AttentionSpec], placement: Placement) -> AttentionBackend:
    """The backend asked for, or the first of the preferred ones that supports every layer."""
    candidates = [find_backend(known) for known in (PREFERRED if name == "auto" else (name,))]
    reasons = {}
    for backend in candidates:
        reason = next(filter(None, (backend.supports(s, placement.dtype, placement.device) for s in specs)), None)
        if reason is None:
            return backend
        reasons[backend.name] = reason
    raise ConfigError(f"no attention backend can run this model: {reasons}")


def _fit_memory(
    geometry: BlockGeometry, bytes_per_block: int, state_bytes: int, config: CacheConfig, device: torch.device
) -> BlockGeometry:
    """The geometry, with no more blocks than the memory holds where their number was left open.

    Raises: ConfigError, with the numbers, if what was asked for does not fit.
    """
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[0]
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = int(there * config.gpu_memory_utilization)
    fitting = (budget - state_bytes) // bytes_per_block - 1  # one more block is scratch
    if geometry.num_blocks <= fitting:
        return geometry
    if geometry.shareable and config.num_blocks is None and fitting >= 1:
        return replace(geometry, num_blocks=fitting)
    needed = (geometry.num_blocks + 1) * bytes_per_block + state_bytes
    raise ConfigError(
        f"the cache needs {needed / 2**30:.1f} GiB ({geometry.num_blocks} blocks "
        f"of {geometry.block_size} tokens) and {budget / 2**30:.1f} GiB may be used",
        hint="lower num_blocks, max_model_len or max_num_seqs, or raise gpu_memory_utilization",
    )
