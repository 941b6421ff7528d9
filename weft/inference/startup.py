"""From a configuration and a checkpoint to a runner that can execute steps: what is chosen, how much memory is left.

On a GPU the largest step is run, and the largest graph captured, over a pool of one block, to see how much memory steps
take; the pool gets what is left, and then all graphs are captured, since they hold addresses.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from weft.attention import find_backend
from weft.attention.interface import AttentionBackend, AttentionSpec, Cache
from weft.config import BlockGeometry, EngineConfig, ExecutionConfig, Limits
from weft.errors import ConfigError
from weft.inference.backing import Backing, back
from weft.inference.device_state import DeviceState
from weft.inference.placement import Placement, find_device, place
from weft.inference.policies import build_policy
from weft.inference.pool_memory import PoolMemory
from weft.inference.runner import ModelRunner, Observer
from weft.inference.sampler import GumbelSampler, KernelSampler, Sampler
from weft.inference.step_sizes import StepSizes, tokens_worth
from weft.kernels._jit import runs_on
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


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What options, machine and the files' headers decide before any weight is read.

    specs: of each layer's attention.   geometry: as many blocks as are wanted, whether or not they fit.
    bytes_per_block: over all layers.
    """

    placement: Placement
    limits: Limits
    vocab_size: int
    specs: tuple[AttentionSpec, ...]
    weight_bytes: int
    backing: Backing
    backend: AttentionBackend
    geometry: BlockGeometry
    bytes_per_block: int


def _choose(config: EngineConfig, checkpoint: Checkpoint) -> _Chosen:
    placement = place(config.model, checkpoint.stored_dtype)
    model_config = read_config(checkpoint)
    limits = _limits(config, model_config.max_model_len)
    backing = back(config.execution, placement)
    outline = read_outline(checkpoint, dtype=placement.dtype)
    if backing.check_shapes is not None:
        backing.check_shapes(outline, placement)
    specs = outline.attention_specs
    backend = backing.attention(config.cache.attention_backend, specs, placement)
    geometry = backend.geometry(limits, config.cache)
    return _Chosen(
        placement=placement,
        limits=limits,
        vocab_size=model_config.vocab_size,
        specs=specs,
        weight_bytes=sum(parameter.nbytes for parameter in _parameters(outline)),
        backing=backing,
        backend=backend,
        geometry=geometry,
        bytes_per_block=backend.bytes_per_block(specs, geometry, placement.dtype),
    )


def check_options(config: EngineConfig) -> None:
    """What no model could make right: names that nothing has, a device that is not there.

    Raises: ConfigError.
    """
    build_policy(config.scheduler)
    if config.cache.attention_backend != "auto":
        find_backend(config.cache.attention_backend)
    find_device(config.model.device)


def check(config: EngineConfig, checkpoint: Checkpoint) -> BlockGeometry:
    """What options, model and machine have against each other, found from the files' headers alone; and the blocks that
    are wanted, whether or not they fit.

    Raises: ConfigError, CheckpointError and their kinds, as `start` does.
    """
    check_options(config)
    return _choose(config, checkpoint).geometry


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
    chosen = _choose(config, checkpoint)
    placement, limits, specs, weight_bytes = chosen.placement, chosen.limits, chosen.specs, chosen.weight_bytes
    backing, backend = chosen.backing, chosen.backend
    wanted, bytes_per_block = chosen.geometry, chosen.bytes_per_block
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

    operations = backing.operations_for(model, placement)
    own_sampler: Sampler = GumbelSampler()
    if not backing.is_plain or (placement.device.type == "cuda" and runs_on(placement.device)):
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
            vocab_size=chosen.vocab_size,
            logprobs_mode=config.model.logprobs_mode,
            observe=observe,
        )

    sizes = StepSizes(
        limits,
        batch_sizes=config.execution.graph_batch_sizes,
        most_tokens=tokens_worth(sum(parameter.numel() for parameter in _parameters(model)), len(specs)),
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
        f"{backing.name} operations, {'prepacked' if placement.prepacked else 'plain'} linear layers; "
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
        vocab_size=chosen.vocab_size,
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


def _parameters(model: Model) -> Iterator[nn.Parameter]:
    assert isinstance(model, nn.Module)
    return model.parameters()


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
