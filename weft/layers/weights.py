"""Filling a model's parameters from a checkpoint: each exactly once, or an error that names the tensor.

Knows names, shapes and views of parameters; knows no file format and no model family.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from weft.errors import TensorError, UnsupportedCheckpointError
from weft.layers.linear import Embedding, Linear
from weft.layers.norm import RMSNorm

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class WeightSlots:
    """From a checkpoint's tensor name to the part of a parameter that it fills.

    A packed matrix has one slot for each projection in it: a slot is a view, so filling it fills the parameter.
    """

    def __init__(self) -> None:
        self._views: dict[str, Tensor] = {}
        self._copies: dict[str, str] = {}

    def add(self, module: Linear | Embedding | RMSNorm, *names: str) -> None:
        """Slots `<name>.weight` and, where the module has one, `<name>.bias`; one name for each packed part."""
        parts = module.parts if isinstance(module, Linear) else (module.weight.shape[0],)
        assert len(parts) == len(names), f"{len(names)} names for {len(parts)} packed parts"
        weights = module.weight.detach().split(parts)
        self._views.update({f"{name}.weight": view for name, view in zip(names, weights, strict=True)})
        bias = module.bias if isinstance(module, Linear) else None
        if bias is not None:
            views = bias.detach().split(parts)
            self._views.update({f"{name}.bias": view for name, view in zip(names, views, strict=True)})

    def add_copy(self, name: str, of: str) -> None:
        """A tensor that a checkpoint may repeat (a tied head): it is accepted only if it equals tensor `of`."""
        self._copies[name] = of

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def fill(self, tensors: Iterable[tuple[str, Tensor]], *, ignored: tuple[str, ...] = ()) -> None:
        """Copy each tensor into its slot, cast to the slot's dtype.

        ignored: suffixes of names that hold no parameter (rotary buffers of old checkpoints).
        Raises: TensorError for a missing, unexpected, twice-given or wrongly shaped tensor and for a repeated one that
            differs; UnsupportedCheckpointError for a tensor in a quantised type.
        """
        seen: set[str] = set()
        repeated: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name.endswith(ignored):
                continue
            if name in seen:
                raise TensorError(f"tensor {name!r} is given twice")
            seen.add(name)
            if name in self._copies:
                repeated[name] = tensor
                continue
            if name not in self._views:
                raise TensorError(
                    f"tensor {name!r} ({_shape(tensor)}) is in the checkpoint but no parameter takes it",
                    hint="the config may declare another architecture, or leave out biases or an untied head",
                )
            self._fill_one(name, tensor)
        missing = [name for name in self._views if name not in seen]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise TensorError(f"the checkpoint lacks {', '.join(map(repr, missing[:3]))}{more}")
        for name, tensor in repeated.items():
            original = self._views[self._copies[name]]
            if tensor.shape != original.shape or not torch.equal(tensor.to(original), original):
                raise TensorError(
                    f"tensor {name!r} differs from {self._copies[name]!r}, which the config ties it to",
                    hint="set tie_word_embeddings to false in config.json if the head is meant to differ",
                )

    def _fill_one(self, name: str, tensor: Tensor) -> None:
        view = self._views[name]
        if tensor.dtype not in WEIGHT_DTYPES:
            raise UnsupportedCheckpointError(
                f"tensor {name!r} holds {tensor.dtype}, not plain floating-point weights",
                hint="the checkpoint looks quantised; load an unquantised one",
            )
        if tensor.shape != view.shape:
            raise TensorError(f"tensor {name!r} is {_shape(tensor)} but the parameter is {_shape(view)}")
        view.copy_(tensor)


def poison(model: nn.Module) -> None:
    """Fill every parameter with NaN, so that one which no tensor sets cannot pass for a weight."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
