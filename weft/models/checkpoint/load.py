"""From a checkpoint to a model whose every parameter is set."""

from typing import Any, cast

import torch
from torch import nn
from tqdm import tqdm

from weft.layers.prepacked import prepack
from weft.layers.weights import poison
from weft.models import find_family
from weft.models.checkpoint.interface import Checkpoint
from weft.models.family import Model

# Rotary frequencies that old checkpoints carry as buffers: weft computes them.
_IGNORED = ("rotary_emb.inv_freq",)


def read_config(checkpoint: Checkpoint) -> Any:
    """The family's own config. Raises: UnknownModelTypeError, CheckpointError, UnsupportedCheckpointError."""
    return find_family(checkpoint.config.get("model_type")).read_config(checkpoint.config)


def read_outline(checkpoint: Checkpoint, *, dtype: torch.dtype) -> Model:
    """The model without its weights, in no memory: what its attention will need, and the shapes of its matrices."""
    family = find_family(checkpoint.config.get("model_type"))
    return cast("Model", family.build(read_config(checkpoint), 1, dtype, torch.device("meta")))


def load_model(
    checkpoint: Checkpoint,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    dummy_seed: int | None = None,
    show_progress: bool = False,
    prepacked: bool = False,
) -> Model:
    """A model with the checkpoint's weights, for sequences of at most `max_positions` tokens.

    dummy_seed: fill with small random weights of this seed instead, for measuring speed.
    prepacked: its linear layers become oneDNN's, for inference only.
    Raises: what `read_config` and `WeightSlots.fill` raise; nothing half-loaded is returned.
    """
    family = find_family(checkpoint.config.get("model_type"))
    module = family.build(read_config(checkpoint), max_positions, dtype, device)
    if dummy_seed is not None:
        _randomise(module, dummy_seed)
    else:
        _fill(module, checkpoint, show_progress)
    if prepacked:
        prepack(module)
    return cast("Model", module)


def _fill(module: nn.Module, checkpoint: Checkpoint, show_progress: bool) -> None:
    poison(module)
    tensors = tqdm(
        checkpoint.tensors(),
        total=checkpoint.num_tensors,
        desc="Loading weights",
        unit="tensor",
        disable=not show_progress,
        leave=False,
    )
    # An iterator: a type checker at run time may look into an iterable, and what it takes out of this one is lost.
    cast("Model", module).weight_slots().fill(iter(tensors), ignored=_IGNORED)


def _randomise(module: nn.Module, seed: int) -> None:
    """Normal weights of deviation 0.02, norms at 1: activations stay finite at any depth."""
    for index, parameter in enumerate(module.parameters()):
        generator = torch.Generator(device=parameter.device).manual_seed(seed + index)
        with torch.no_grad():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
