"""From a configuration and a checkpoint to a runner that can execute steps: what is chosen, how much memory is left.

On a GPU the largest step is run, and the largest graph captured, over a pool of one block, to see how much memory steps
take; the pool gets what is left, and then all graphs are captured, since they hold addresses.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.attention import PREFERRED, find_backend
from weft.attention.interface import AttentionBackend, AttentionSpec, Cache
from weft.config import BlockGeometry, EngineConfig, ExecutionConfig, Limits
from weft.errors import ConfigError
from weft.inference.device_state import DeviceState
from weft.inference.placement import Placement, place
from weft.inference.pool_memory import PoolMemory
from weft.inference.runner import ModelRunner, Observer
from weft.inference.sampler import GumbelSampler, KernelSampler, Sampler
from weft.inference.step_sizes import StepSizes, tokens_worth
from weft.kernels._jit import interpreting, runs_on
from weft.layers.fused import FusedOperations
from weft.layers.kernel_choice import forced
from weft.layers.operations import Attend, Operations, PlainOperations
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.load import load_model, read_config, read_outline
from weft.models.family import Model


@dataclass(kw_only=True)
class Seconds:
    """What each part of starting took, by name, in order."""

    by_part: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.by_part[part] = time.perf_counter() - begin

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.by_part.items())


@dataclass(frozen=True, kw_only=True)
class Ready:
    """All that was chosen, and a runner made of it. description: the same in words.   overlap: one step behind.

    seconds: by part, what it took: weights, memory (to see what steps take), cache, graphs.
    """

    runner: ModelRunner
    model: Model
    placement: Placement
    limits: Limits
    geometry: BlockGeometry
    vocab_size: int
    description: str
    seconds: dict[str, float]
    overlap: bool


def check(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """What options, model and machine have against each other, found from the files' headers alone.

    Raises: ConfigError, CheckpointError and their kinds, as `start` does.
    """
    placement = place(config.model, checkpoint.stored_dtype)
    _limits(config, read_config(checkpoint).max_model_len)
    _operations(config.execution, placement)


def start(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    sampler: Sampler | None = None,
    observe: Observer | None = None,
    show_progress: bool = False,
) -> Ready:
    """Load the model, allocate the cache, capture the graphs.

    Raises: ConfigError, CheckpointError and their kinds, before the weights are read where that is possible.
    """
    seconds = Seconds()
    placement = place(config.model, checkpoint.stored_dtype)
    model_config = read_config(checkpoint)
    limits = _limits(config, model_config.max_model_len)
    specs, weight_bytes = read_outline(checkpoint, dtype=placement.dtype)
    backend = _backend(config.cache.attention_backend, specs, placement)
    operations_name, operations = _operations(config.execution, placement)
    wanted = backend.geometry(limits, config.cache)
    bytes_per_block = backend.bytes_per_block(specs, wanted, placement.dtype)
    state_bytes = DeviceState.bytes_for(limits, wanted)
    memory = PoolMemory(config.cache, placement.device)
    # Without what steps take, and before the weights are read: what cannot fit at all.
    geometry = memory.fit(wanted, bytes_per_block, state_bytes, weight_bytes=weight_bytes)
    with seconds.of("weights"):
        model = load_model(
            checkpoint,
            max_positions=limits.max_model_len,
            dtype=placement.dtype,
            device=placement.device,
            dummy_seed=config.model.seed if config.model.load_format == "dummy" else None,
            show_progress=show_progress,
            prepacked=placement.prepacked,
        )

    own_sampler: Sampler = GumbelSampler()
    if operations_name != "plain" or (placement.device.type == "cuda" and runs_on(placement.device)):
        own_sampler = KernelSampler()

    def runner_over(cache: Cache, geometry: BlockGeometry) -> ModelRunner:
        return ModelRunner(
            model,
            cache,
            sampler or own_sampler,
            limits=limits,
            geometry=geometry,
            device=placement.device,
            operations=operations,
            vocab_size=model_config.vocab_size,
            logprobs_mode=config.model.logprobs_mode,
            observe=observe,
        )

    sizes = StepSizes(
        limits,
        batch_sizes=config.execution.graph_batch_sizes,
        most_tokens=tokens_worth(_num_parameters(model), len(specs)),
    )

    def trial() -> ModelRunner:
        least = replace(wanted, num_blocks=1)
        return runner_over(backend.allocate(specs, least, placement.dtype, placement.device), least)

    with seconds.of("memory"):
        workspace_bytes = _workspace_bytes(trial, sizes, config.execution, placement.device)
    # By now the weights are out of what is free on a GPU; a CPU's memory is counted whole.
    unread_bytes = 0 if placement.device.type == "cuda" else weight_bytes
    geometry = memory.fit(wanted, bytes_per_block, state_bytes + workspace_bytes, weight_bytes=unread_bytes)
    with seconds.of("cache"):
        cache = backend.allocate(specs, geometry, placement.dtype, placement.device)
        runner = runner_over(cache, geometry)
    overlap = placement.device.type == "cuda" if config.execution.overlap is None else config.execution.overlap
    captures = runner.can_capture and not config.execution.enforce_eager
    if captures:
        with seconds.of("graphs"):
            runner.capture(sizes, show_progress=show_progress)
    description = (
        f"{checkpoint.config.get('model_type')} on {placement.device} in "
        f"{str(placement.dtype).removeprefix('torch.')} ({placement.reason}); "
        f"{operations_name} operations, {'prepacked' if placement.prepacked else 'plain'} linear layers; "
        f"attention {backend.name}, cache {geometry.num_blocks * bytes_per_block / 2**20:.0f} MiB "
        f"({geometry.num_blocks} blocks of {geometry.block_size} tokens); "
        f"{sizes if captures else 'no graphs'}; overlap {'on' if overlap else 'off'}; "
        f"policy {config.scheduler.policy}; max_model_len {limits.max_model_len}; ready after {seconds}"
    )
    return Ready(
        runner=runner,
        model=model,
        placement=placement,
        limits=limits,
        geometry=geometry,
        vocab_size=model_config.vocab_size,
        description=description,
        seconds=seconds.by_part,
        overlap=overlap,
    )


def _workspace_bytes(
    trial: Callable[[], ModelRunner], sizes: StepSizes, execution: ExecutionConfig, device: torch.device
) -> int:
    """What steps take beside weights, state and cache: seen in a trial on a GPU; on a CPU it comes and goes."""
    if device.type != "cuda":
        return 0
    taken = trial().measure(sizes, with_graphs=not execution.enforce_eager)
    torch.cuda.empty_cache()
    return taken


def _num_parameters(model: Model) -> int:
    assert isinstance(model, nn.Module)
    return sum(parameter.numel() for parameter in model.parameters())


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


def _operations(config: ExecutionConfig, placement: Placement) -> tuple[str, Callable[[Attend], Operations[Any]]]:
    """The operations' name, and what makes one step's of its attention."""
    asked, choice, device = config.operations, config.kernel_choice, placement.device
    is_plain = asked == "plain" or (asked == "auto" and not (device.type == "cuda" and runs_on(device)))
    if choice != "auto" and (is_plain or placement.prepacked):  # who forces a kernel is not to measure another
        what = f"operations={asked!r} on {device}" if is_plain else "prepacked linear layers, which multiply themselves"
        raise ConfigError(
            f"kernel_choice={choice!r} has no effect on {what}",
            hint="operations='fused' and cpu_linear='plain', or kernel_choice='auto'"
            if runs_on(device)
            else "kernel_choice='auto': what can be forced runs on CUDA",
        )
    if is_plain:
        return "plain", PlainOperations
    if not runs_on(device):
        raise ConfigError(
            f"operations='fused' are Triton kernels, which do not run on {device} here",
            hint="operations='plain' runs anywhere",
        )
    if interpreting() and placement.dtype == torch.bfloat16:
        raise ConfigError(
            "operations='fused' with dtype='bfloat16': Triton's interpreter computes bfloat16 wrongly",
            hint="dtype='float32', or operations='plain'",
        )
    if choice == "auto":
        return "fused", FusedOperations
    return f"fused ({choice})", partial(FusedOperations, choose=forced(choice))
