"""Fused operations against the plain ones, with every kernel forced in turn: one block and its logits, float32.

Small, and pairwise: a program of Triton's interpreter takes milliseconds, and a one-pass product has one a row.
"""

import pytest
import torch
from allpairspy import AllPairs
from torch import Tensor

from weft.kernels._few_rows_tiles import MANY_ROWS
from weft.kernels._jit import runs_on
from weft.layers import kernel_choice
from weft.layers.fused import FusedOperations, ResidualStream
from weft.layers.heads import HeadTransform
from weft.layers.kernel_choice import KernelChoice, ProductShape, batch_invariant, choose, forced
from weft.layers.linear import Embedding, Linear
from weft.layers.mlp import GatedMLP
from weft.layers.norm import RMSNorm
from weft.layers.operations import PlainOperations
from weft.layers.rope import RopeConfig, RotaryTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, INNER, VOCAB = 24, 40, 37
NUM_TOKENS = 4

pytestmark = pytest.mark.skipif(not runs_on(DEVICE), reason="Triton is Linux-only")


def filled(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


class Parts:
    """What one block is made of."""

    def __init__(self, *, bias: bool) -> None:
        place = {"dtype": torch.float32, "device": DEVICE}
        self.embedding = Embedding(VOCAB, HIDDEN, **place)
        self.norms = [RMSNorm(HIDDEN, 1e-5, **place) for _ in range(3)]
        self.qkv = Linear(HIDDEN, (HIDDEN, HIDDEN, HIDDEN), bias=bias, **place)
        self.output = Linear(HIDDEN, (HIDDEN,), bias=bias, **place)
        self.mlp = GatedMLP(HIDDEN, INNER, bias=bias, **place)
        self.head = Linear(HIDDEN, (VOCAB,), **place)
        rope = RopeConfig.of({"max_position_embeddings": 8, "rope_theta": 1e4}, HIDDEN // 2)
        self.heads = HeadTransform(2, 2, HIDDEN // 2, RotaryTable(rope, 8, **place))
        for seed, module in enumerate((self.embedding, *self.norms, self.qkv, self.output, self.mlp, self.head)):
            filled(module, seed)

    def logits(self, ops: PlainOperations | FusedOperations, token_ids: Tensor, rows: Tensor) -> Tensor:
        hidden = ops.embed(self.embedding, token_ids)
        for layer in range(2):
            qkv = ops.norm_linear(hidden, self.norms[0], self.qkv)
            attended = ops.attend(layer, qkv, token_ids, self.heads)
            hidden = ops.linear_add(attended, self.output, hidden)
            hidden = ops.norm_mlp_add(hidden, self.norms[1], self.mlp)
        return ops.logits(hidden, rows, self.norms[2], self.head)


def attend(layer: int, qkv: Tensor, positions: Tensor, heads: HeadTransform) -> Tensor:
    """Stands for attention: any function of the packed row."""
    query, key, value = qkv.chunk(3, dim=-1)
    return (torch.tanh(query) * key + value).contiguous()


# One token, each token, and some of the tokens, as the rows whose logits are wanted.
ROWS = ([0], [0, 1], [1, 3])
CHOICES = [*kernel_choice.PRODUCTS, "auto", "mixed", "batch-invariant"]
PAIRS = [tuple(pair) for pair in AllPairs([CHOICES, ROWS, [False, True]])]


@pytest.mark.parametrize(("product", "rows", "bias"), PAIRS, ids=str)
def test_every_kernel_computes_the_plain_block(product: str, rows: list[int], bias: bool) -> None:
    parts = Parts(bias=bias)
    token_ids = torch.arange(NUM_TOKENS if rows == [1, 3] else len(rows), device=DEVICE) * 11 + 1
    wanted = torch.tensor(rows, device=DEVICE)
    made: list[ProductShape] = []

    def mixed(shape: ProductShape) -> KernelChoice:
        """Another kernel for each product in turn, so that each finds what every other leaves behind."""
        made.append(shape)
        return forced(kernel_choice.PRODUCTS[len(made) * len(made) % 3])(shape)

    chosen = {"auto": choose, "mixed": mixed, "batch-invariant": batch_invariant}.get(product) or forced(product)
    with torch.inference_mode():
        expected = parts.logits(PlainOperations(attend), token_ids, wanted)
        found = parts.logits(FusedOperations(attend, chosen), token_ids, wanted)
    assert found.shape == expected.shape
    # Sums of 24 to 40 products in another order: 3e-7 of the largest logit here, 2e-6 at twice the width.
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_rows_that_no_program_holds_are_left_to_others() -> None:
    shape = ProductShape(
        rows=1, outer=8192, inner=28_672, use="added", has_bias=False, dtype=torch.bfloat16, compute_capability=90
    )
    assert choose(shape).product != "one_pass"
    assert forced("one_pass")(shape).product == "library"


def test_a_choice_is_one_that_can_be() -> None:
    for rows in (1, 2, 8, 9, 64, 95, 96, 512):
        for use in ("plain", "swiglu", "added"):
            for dtype in (torch.float32, torch.bfloat16):
                for capability in (0, 80, 90):
                    for has_bias in (False, True):
                        shape = ProductShape(
                            rows=rows,
                            outer=2048,
                            inner=2048,
                            use=use,
                            has_bias=has_bias,
                            dtype=dtype,
                            compute_capability=capability,
                        )
                        for made in (choose(shape), *(forced(product)(shape) for product in kernel_choice.PRODUCTS)):
                            assert kernel_choice.can(made.product, shape)
                            assert (made.planes is not None) == (made.product == "few_rows" and use == "added")


@pytest.mark.parametrize(("count", "bias", "planes"), [(2, False, 2), (2, True, 1), (MANY_ROWS, False, 1)])
def test_a_sum_in_parts_has_one_bias_and_planes_for_few_rows_alone(count: int, bias: bool, planes: int) -> None:
    place = {"dtype": torch.float32, "device": DEVICE}
    linear, norm = Linear(1024, (HIDDEN,), bias=bias, **place), RMSNorm(HIDDEN, 1e-5, **place)
    filled(linear, 0)
    filled(norm, 1)
    x, residual = torch.randn(count, 1024, device=DEVICE), torch.randn(count, HIDDEN, device=DEVICE)
    with torch.inference_mode():
        hidden = FusedOperations(attend, batch_invariant).linear_add(x, linear, ResidualStream(residual))
        expected = residual + linear(x)
        assert hidden.addend is not None
        assert hidden.addend.shape == (planes, count, HIDDEN)
        hidden.normed(norm)
    assert (hidden.residual - expected).abs().max() < 1e-5 * expected.abs().max()
