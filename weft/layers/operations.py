"""The protocol that models are written in, and its plain backing, which is the reference and the CPU path.

A method stands at the grain at which kernels can fuse, so that a model reads as its formula and a backing may still
be fast. Arguments are modules (weight and bias; packed, quantised or adapted), not tensors, and a projection multiplies
itself. Operations know neither requests nor caches: attention reaches them as an `Attend`.
"""

from typing import Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from weft.layers.heads import HeadTransform
from weft.layers.linear import Embedding, Projection
from weft.layers.mlp import GatedMLP
from weft.layers.norm import RMSNorm, rms_norm

Hidden = TypeVar("Hidden")


@runtime_checkable
class Attend(Protocol):
    """Rotate (and normalise) heads, write keys and values where the step keeps them, attend: one step, any layer."""

    def __call__(
        self,
        layer: int,
        qkv: Float[Tensor, "T_total packed"],
        positions: Int[Tensor, "T_total"],
        heads: HeadTransform,
    ) -> Float[Tensor, "T_total attended"]: ...


@runtime_checkable
class Operations(Protocol[Hidden]):
    """`Hidden` is opaque to the model: a backing may carry more than a tensor (a sum that the next norm finishes)."""

    def embed(self, embedding: Embedding, token_ids: Int[Tensor, "T_total"]) -> Hidden: ...

    def norm_linear(self, hidden: Hidden, norm: RMSNorm, linear: Projection) -> Float[Tensor, "T_total out"]: ...

    def attend(
        self,
        layer: int,
        qkv: Float[Tensor, "T_total packed"],
        positions: Int[Tensor, "T_total"],
        heads: HeadTransform,
    ) -> Float[Tensor, "T_total attended"]: ...

    def linear_add(self, x: Float[Tensor, "T_total in"], linear: Projection, hidden: Hidden) -> Hidden: ...

    def norm_mlp_add(self, hidden: Hidden, norm: RMSNorm, mlp: GatedMLP) -> Hidden: ...

    def logits(
        self, hidden: Hidden, rows: Int[Tensor, "R"], norm: RMSNorm, head: Projection
    ) -> Float[Tensor, "R V"]: ...


class PlainOperations:
    """Plain torch in HuggingFace's order of casts: with plain `Linear`s equal to it bit for bit at equal shapes.

    Rounding points: after each norm, each product and its bias, silu, gate * up, and each residual sum.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def embed(self, embedding: Embedding, token_ids: Int[Tensor, "T_total"]) -> Float[Tensor, "T_total E"]:
        return functional.embedding(token_ids, embedding.weight)

    def norm_linear(
        self, hidden: Float[Tensor, "T_total E"], norm: RMSNorm, linear: Projection
    ) -> Float[Tensor, "T_total out"]:
        return linear(rms_norm(hidden, norm))

    def attend(
        self,
        layer: int,
        qkv: Float[Tensor, "T_total packed"],
        positions: Int[Tensor, "T_total"],
        heads: HeadTransform,
    ) -> Float[Tensor, "T_total attended"]:
        return self._attend(layer, qkv, positions, heads)

    def linear_add(
        self, x: Float[Tensor, "T_total in"], linear: Projection, hidden: Float[Tensor, "T_total E"]
    ) -> Float[Tensor, "T_total E"]:
        return hidden + linear(x)

    def norm_mlp_add(
        self, hidden: Float[Tensor, "T_total E"], norm: RMSNorm, mlp: GatedMLP
    ) -> Float[Tensor, "T_total E"]:
        gate, up = self.norm_linear(hidden, norm, mlp.gate_up).chunk(2, dim=-1)
        # torch's vectorised exp and its scalar tail differ in the last bit, and rows of a view each have a tail.
        return self.linear_add(functional.silu(gate.contiguous()) * up, mlp.down, hidden)

    def logits(
        self,
        hidden: Float[Tensor, "T_total E"],
        rows: Int[Tensor, "R"],
        norm: RMSNorm,
        head: Projection,
    ) -> Float[Tensor, "R V"]:
        """Float32 logits of the selected rows, the product itself in the model's dtype as in HuggingFace."""
        return head(rms_norm(hidden[rows], norm)).float()
