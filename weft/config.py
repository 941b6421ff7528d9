"""The frozen configuration of an engine, composed of one part for each of its parts.

Knows names and ranges only: which policies, backends and models exist is known where they live. Derived values
(the size of the pool, the dtype chosen) are returned by whoever derives them and never written back here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from weft.errors import ConfigError, UnknownArgumentError, shown
from weft.options import is_duration, named, positive, strict

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "float16", "bfloat16")
OPERATIONS = ("auto", "plain", "fused")
KERNEL_CHOICES = ("auto", "one_pass", "few_rows", "library")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
CPU_LINEARS = ("auto", "plain", "prepacked")
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}


@strict
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which weights, and what they become in memory.

    model: an alias (`smollm2-135m`), a local folder, a `.gguf` file, or a hub id.
    dtype: `auto` is the checkpoint's own on CUDA, and float32 for a quantised GGUF and on CPUs.
    device: `auto`, `cpu`, `cuda` or `cuda:N`.
    cpu_linear: how linear layers multiply on a CPU: `plain` is torch's own product and equals HuggingFace bit for bit
        at equal shapes; `prepacked` is faster, oneDNN on weights it has reordered; `auto` is the faster one that runs.
    seed: seeds the requests that bring no seed, and dummy weights.
    max_model_len: longest sequence in tokens, prompt included; None is the model's own limit.
    logprobs_mode: of what the logprobs of sampled tokens are: `raw_logprobs` of what the model says, whatever a request
        asks for, or `processed_logprobs` of what the token was drawn from, after processors, temperature and
        truncation (at temperature 0 after processors alone). Those of prompts are raw.
    max_logprob_entries: what a request for all logprobs (-1) may amount to, places times vocabulary, in its prompt and
        in each answer; the host holds 300 bytes an entry until they are given out. None is no limit.
    """

    model: str
    revision: str | None = None
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str = "auto"
    cpu_linear: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    logprobs_mode: str = "raw_logprobs"
    max_logprob_entries: int | None = 2**22

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a name, a folder or a file, got {shown(self.model)}")
        named("ModelConfig", load_format=self.load_format, dtype=self.dtype, device=self.device)
        named("ModelConfig", cpu_linear=self.cpu_linear, logprobs_mode=self.logprobs_mode)
        if self.cpu_linear not in CPU_LINEARS:
            raise ConfigError(f"unknown cpu_linear={self.cpu_linear!r}", hint="one of " + ", ".join(CPU_LINEARS))
        if self.logprobs_mode not in LOGPROBS_MODES:
            known = ", ".join(LOGPROBS_MODES)
            raise ConfigError(f"unknown logprobs_mode={self.logprobs_mode!r}", hint=f"one of {known}")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(f"unknown load_format={self.load_format!r}", hint="one of " + ", ".join(LOAD_FORMATS))
        if DTYPE_ALIASES.get(self.dtype, self.dtype) not in DTYPES:
            known = ", ".join((*DTYPES, *DTYPE_ALIASES))
            raise ConfigError(f"unknown dtype={self.dtype!r}", hint=f"one of {known}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed must be an integer in [0, 2**64), got {shown(self.seed)}")
        if self.revision is not None:
            named("ModelConfig", revision=self.revision)
        if not isinstance(self.skip_tokenizer_init, bool):
            raise ConfigError(f"skip_tokenizer_init must be True or False, got {shown(self.skip_tokenizer_init)}")
        positive("ModelConfig", max_model_len=self.max_model_len, max_logprob_entries=self.max_logprob_entries)


@strict
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The memory for keys and values.

    attention_backend: a name from `weft/attention`, or `auto`.
    block_size: tokens of a block; None is the backend's own.
    num_blocks: blocks of the pool; None is what the limits could fill, or what the memory holds if that is less.
    enable_prefix_caching: requests that begin alike share the blocks of what they share.
    gpu_memory_utilization: the part of the device's free memory (on CPUs: of the RAM) that the cache may take.
    """

    attention_backend: str = "auto"
    block_size: int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        named("CacheConfig", attention_backend=self.attention_backend)
        positive("CacheConfig", block_size=self.block_size, num_blocks=self.num_blocks)
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching must be True or False, got {shown(self.enable_prefix_caching)}")
        part = self.gpu_memory_utilization
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {shown(part)}")


# Fields of SchedulerConfig that only some policies read: setting one for another policy is an error.
POLICY_OPTIONS = ("max_prefills_per_round", "priority_ageing_s")


@strict
@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold.

    policy: a name from `weft/inference/policies`.
    max_num_seqs: requests that run at once.
    max_num_batched_tokens: new tokens of one step, over all requests.
    max_chunk_tokens: new tokens of one request in one step; None is the whole budget.
    max_num_queued_requests, max_num_queued_tokens: what may wait before a request is refused; None is no limit. The
        prompts of one call of LLM are queued as there is room.
    max_prefills_per_round: prompts of one step, for the policy prefill_first; None is max_num_seqs.
    priority_ageing_s: seconds of waiting that weigh as much as a priority lower by one, for the policy priority.
    """

    policy: str = "fcfs"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    max_num_queued_requests: int | None = None
    max_num_queued_tokens: int | None = None
    max_prefills_per_round: int | None = None
    priority_ageing_s: float | None = None

    def __post_init__(self) -> None:
        named("SchedulerConfig", policy=self.policy)
        positive(
            "SchedulerConfig",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_num_queued_requests=self.max_num_queued_requests,
            max_num_queued_tokens=self.max_num_queued_tokens,
            max_prefills_per_round=self.max_prefills_per_round,
        )
        if self.priority_ageing_s is not None and not is_duration(self.priority_ageing_s):
            raise ConfigError(
                f"priority_ageing_s must be a number of seconds above 0, got {shown(self.priority_ageing_s)}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step could not give each running request one token",
                hint="raise max_num_batched_tokens or lower max_num_seqs",
            )


@strict
@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How a step reaches the device. No token in float32 depends on it; last bits do, on kernels and padded sizes.

    enforce_eager: no CUDA graphs; every step is launched kernel by kernel.
    overlap: plan a step while the device runs the one before, and read tokens one step late; None: on CUDA only.
    operations: `plain` is torch in HuggingFace's order of casts, `fused` weft's own kernels; `auto` is fused on CUDA.
    kernel_choice: force one kernel (`one_pass`, `few_rows`, `library`) wherever fused operations can use it, for tests
        and to find a culprit; `auto` is the fastest by shape.
    graph_batch_sizes: batch sizes whose decode steps are captured; None is about twenty up to max_num_seqs.
    batch_invariant: a request's logits are the same to the bit whatever runs beside it, however its prompt is cut and
        whatever of it is cached, on one kind of device, with one version of everything, one model and max_model_len;
        `auto` is on where that was measured to cost at most 5 % (nowhere so far).
    """

    enforce_eager: bool = False
    overlap: bool | None = None
    operations: str = "auto"
    kernel_choice: str = "auto"
    graph_batch_sizes: tuple[int, ...] | None = None
    batch_invariant: bool | str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.enforce_eager, bool):
            raise ConfigError(
                f"enforce_eager must be True or False, got {shown(self.enforce_eager)}", hint="True captures no graphs"
            )
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise ConfigError(
                f"overlap must be True, False or None, got {shown(self.overlap)}", hint="None overlaps on CUDA only"
            )
        if not isinstance(self.batch_invariant, bool) and self.batch_invariant != "auto":
            raise ConfigError(
                f"batch_invariant must be True, False or 'auto', got {shown(self.batch_invariant)}",
                hint="'auto' leaves it off: docs/decisions/0019-batch-invariance.md says what it costs",
            )
        named("ExecutionConfig", operations=self.operations)
        if self.operations not in OPERATIONS:
            raise ConfigError(f"unknown operations={self.operations!r}", hint="one of " + ", ".join(OPERATIONS))
        named("ExecutionConfig", kernel_choice=self.kernel_choice)
        if self.kernel_choice not in KERNEL_CHOICES:
            raise ConfigError(
                f"unknown kernel_choice={self.kernel_choice!r}", hint="one of " + ", ".join(KERNEL_CHOICES)
            )
        if self.graph_batch_sizes is not None:
            if not isinstance(self.graph_batch_sizes, tuple) or not self.graph_batch_sizes:
                raise ConfigError(
                    f"graph_batch_sizes must be a tuple of batch sizes, got {shown(self.graph_batch_sizes)}",
                    hint="enforce_eager=True captures nothing",
                )
            hint = "(1, 8, 64) for three; None captures about twenty, enforce_eager=True nothing"
            for size in self.graph_batch_sizes:
                if size is None:  # which `positive` takes for a default
                    raise ConfigError(
                        f"graph_batch_sizes must hold positive integers, got {shown(self.graph_batch_sizes)}", hint=hint
                    )
                positive("ExecutionConfig", hint, graph_batch_sizes=size)


# The flat names of `weft.LLM(...)`, and the part that each belongs to.
_PARTS: Mapping[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "execution": ExecutionConfig,
}


@strict
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that an engine is built from.

    EngineConfig(model=ModelConfig(model="smollm2-135m"))
    EngineConfig.of(model="smollm2-135m", dtype="bf16", max_num_seqs=32)      # the same fields, flat
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    def __post_init__(self) -> None:
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f"EngineConfig.{name} must be a {kind.__name__}, got {shown(getattr(self, name))}",
                    hint="EngineConfig.of(...) takes flat names",
                )
        sizes, most = self.execution.graph_batch_sizes, self.scheduler.max_num_seqs
        if sizes is not None and max(sizes) > most:
            raise ConfigError(
                f"graph_batch_sizes={sizes} holds {max(sizes)}, and only max_num_seqs={most} requests run at once",
                hint="raise max_num_seqs or leave the size out",
            )

    @classmethod
    def of(cls, **options: Any) -> "EngineConfig":
        """Build from flat names, each sent to the one part that has it.

        Raises: UnknownArgumentError for a name that no part has, ConfigError for a value out of range.
        """
        homes = {item.name: part for part, kind in _PARTS.items() for item in fields(kind)}
        parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
        for name, value in options.items():
            if name not in homes:
                raise UnknownArgumentError("LLM", name, homes)
            parts[homes[name]][name] = value
        return cls(**{part: kind(**parts[part]) for part, kind in _PARTS.items()})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest step that an engine will ever build, and the longest sequence.

    max_num_seqs: B.   max_num_batched_tokens: T_total.   max_model_len: S_max, in tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class BlockGeometry:
    """What the scheduler and the allocator need to know of a cache.

    shareable: two requests may read one block (a contiguous row is one block of S_max tokens, not shareable).
    """

    num_blocks: int
    block_size: int
    shareable: bool

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)
