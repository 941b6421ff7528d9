"""Linear layers whose matrix lies in oneDNN's own layout, reordered once: the fast product of CPUs, for inference only.

`Linear` is the reference. The sums here run in another order, so the last bits differ from HuggingFace's.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.layers.linear import Linear

# torch's names for what its compiler emits for a frozen linear layer on CPUs; the same from torch 2.11 to 2.15.
_onednn = torch.ops.mkldnn


class PrepackedLinear(nn.Module):
    """Stands in the place of a `Linear`: the same product, from a copy of its matrix that only oneDNN can read."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Opaque tensors are no parameters: nothing may train, fill or move them.
        self._packed: Tensor = _onednn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        """`x @ weight.T + bias` for any number of rows, none included."""
        product: Tensor = _onednn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


def prepack(model: nn.Module) -> None:
    """Put a `PrepackedLinear` in the place of every `Linear` of the model, whose weights must be set.

    Each matrix is freed as soon as it is packed, unless an embedding is tied to it.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, PrepackedLinear(child))


def reason_against_prepacking(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why linear layers cannot be prepacked there, in words; None if they can."""
    if device.type != "cpu":
        return f"oneDNN packs for CPUs and the model is on {device}"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"only float32 and bfloat16 are packed, not {str(dtype).removeprefix('torch.')}"
    if dtype == torch.bfloat16 and not _onednn._is_mkldnn_bf16_supported():
        return "oneDNN multiplies no bfloat16 on this CPU"
    return None
