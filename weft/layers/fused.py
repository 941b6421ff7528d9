"""Operations in weft's own kernels, with neighbours fused: the backing of GPUs. `PlainOperations` is the reference.

What a product adds to the residual stream waits there until the next norm, which sums it in the same pass. Rounding
points are those of the kernels: never more than in the plain order, and each kernel says which are missing. Which
kernel multiplies is a `KernelChoice` by shapes; nothing in a model knows of it.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from weft.kernels._jit import capability
from weft.kernels.add_norm import add_norm
from weft.kernels.few_rows_gemm import few_rows_gemm
from weft.kernels.gemv import Norm, gemv
from weft.kernels.silu_multiply import silu_multiply
from weft.layers.heads import HeadTransform
from weft.layers.kernel_choice import Choose, KernelChoice, ProductShape, Use, choose
from weft.layers.linear import Embedding, Linear, Projection
from weft.layers.mlp import GatedMLP
from weft.layers.norm import RMSNorm
from weft.layers.operations import Attend


@dataclass
class ResidualStream:
    """The stream, and what the next norm is still to add to it: rows, or float32 planes `[planes, T_total, E]`."""

    residual: Float[Tensor, "T_total E"]
    addend: Float[Tensor, "*planes T_total E"] | None = None

    def normed(self, norm: RMSNorm) -> Float[Tensor, "T_total E"]:
        """Settle what waits, and normalise."""
        if self.addend is None:
            return add_norm(self.residual, None, norm.weight, norm.epsilon)[1]
        self.residual, normed = add_norm(self.addend, self.residual, norm.weight, norm.epsilon)
        self.addend = None
        return normed


class FusedOperations:
    """One step. Layers that are no plain matrices (quantised ones, say) multiply themselves."""

    def __init__(self, attend: Attend, choose: Choose = choose) -> None:
        self._attend = attend
        self._choose = choose

    def embed(self, embedding: Embedding, token_ids: Int[Tensor, "T_total"]) -> ResidualStream:
        return ResidualStream(functional.embedding(token_ids, embedding.weight))

    def norm_linear(self, hidden: ResidualStream, norm: RMSNorm, linear: Projection) -> Float[Tensor, "T_total out"]:
        choice = self._choice(linear, hidden.residual, "plain")
        if choice is None or not isinstance(linear, Linear):
            return linear(hidden.normed(norm))
        if choice.product == "one_pass":
            if hidden.addend is None:
                inside = Norm(weight=norm.weight, epsilon=norm.epsilon)
                return gemv(hidden.residual, linear.weight, norm=inside, bias=linear.bias)
            return gemv(hidden.normed(norm), linear.weight, bias=linear.bias)
        return _biased(few_rows_gemm(hidden.normed(norm), linear.weight), linear)

    def attend(
        self,
        layer: int,
        qkv: Float[Tensor, "T_total packed"],
        positions: Int[Tensor, "T_total"],
        heads: HeadTransform,
    ) -> Float[Tensor, "T_total attended"]:
        return self._attend(layer, qkv, positions, heads)

    def linear_add(self, x: Float[Tensor, "T_total in"], linear: Projection, hidden: ResidualStream) -> ResidualStream:
        assert hidden.addend is None, "a sum waits for a norm that never came"
        choice = self._choice(linear, x, "added")
        if choice is None or not isinstance(linear, Linear):
            return ResidualStream(hidden.residual, linear(x))
        if choice.product == "one_pass":
            return ResidualStream(gemv(x, linear.weight, bias=linear.bias, residual=hidden.residual))
        planes = few_rows_gemm(x, linear.weight, splits=choice.planes, summed=choice.summed)
        return ResidualStream(hidden.residual, _biased(planes, linear))

    def norm_mlp_add(self, hidden: ResidualStream, norm: RMSNorm, mlp: GatedMLP) -> ResidualStream:
        choice = self._choice(mlp.gate_up, hidden.residual, "swiglu")
        if choice is None or not isinstance(mlp.gate_up, Linear):
            gated = silu_multiply(mlp.gate_up(hidden.normed(norm)))
        elif choice.product == "few_rows" and mlp.gate_up.bias is not None:
            gated = silu_multiply(_biased(few_rows_gemm(hidden.normed(norm), mlp.gate_up.weight), mlp.gate_up))
        elif choice.product == "few_rows":
            gated = few_rows_gemm(hidden.normed(norm), mlp.gate_up.weight, swiglu=True)
        else:
            inside = Norm(weight=norm.weight, epsilon=norm.epsilon) if hidden.addend is None else None
            x = hidden.residual if inside else hidden.normed(norm)
            gated = gemv(x, mlp.gate_up.weight, norm=inside, bias=mlp.gate_up.bias, swiglu=True)
        return self.linear_add(gated, mlp.down, hidden)

    def logits(
        self, hidden: ResidualStream, rows: Int[Tensor, "R"], norm: RMSNorm, head: Projection
    ) -> Float[Tensor, "R V"]:
        """Logits in the model's dtype, unrounded beyond it: who needs float32 widens them, and loses nothing."""
        if len(rows) != len(hidden.residual):  # rows ascend, so as many as there are tokens are all of them
            addend = None if hidden.addend is None else hidden.addend[..., rows, :]
            hidden = ResidualStream(hidden.residual[rows], addend)
        return self.norm_linear(hidden, norm, head)

    def _choice(self, linear: Projection, x: Tensor, use: Use) -> KernelChoice | None:
        """None: the layer multiplies itself."""
        if not isinstance(linear, Linear) or len(x) == 0:
            return None
        outer, inner = linear.weight.shape
        shape = ProductShape(
            rows=len(x),
            outer=outer,
            inner=inner,
            use=use,
            has_bias=linear.bias is not None,
            dtype=x.dtype,
            compute_capability=capability(x.device),
        )
        choice = self._choose(shape)
        return None if choice.product == "library" else choice


def _biased(product: Float[Tensor, "*planes T_total out"], linear: Linear) -> Float[Tensor, "*planes T_total out"]:
    """A product with the bias that its kernel knows nothing of; of planes there is one, where there is a bias."""
    return product if linear.bias is None else product + linear.bias
