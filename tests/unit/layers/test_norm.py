"""RMS norms round where HuggingFace's do."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from weft.layers.norm import RMSNorm, rms_norm

EPSILON = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_norm(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, EPSILON, dtype=dtype, device=torch.device("cpu"))
    with torch.no_grad():
        norm.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(1)))
    return norm


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(2))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (5, 3, 64)], ids=str)
def test_norm_equals_huggingface_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, norm = random_rows(*shape, dtype=dtype), random_norm(shape[-1], dtype)
    reference = LlamaRMSNorm(shape[-1], EPSILON).to(dtype)
    reference.load_state_dict(norm.state_dict())
    assert torch.equal(rms_norm(x, norm), reference(x))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm_is_the_formula_of_the_paper(scale: float) -> None:
    x, norm = scale * random_rows(4, 64, dtype=torch.float32), random_norm(64, torch.float32)
    wide = x.double()
    exact = norm.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    torch.testing.assert_close(rms_norm(x, norm).double(), exact, rtol=1e-6, atol=1e-6)


def test_the_cast_comes_before_the_weight_and_that_shows() -> None:
    x, norm = random_rows(32, 64, dtype=torch.bfloat16), random_norm(64, torch.bfloat16)
    normalised = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPSILON)
    cast_last = (norm.weight.float() * normalised).to(torch.bfloat16)
    assert not torch.equal(rms_norm(x, norm), cast_last)


def test_half_precision_rows_do_not_overflow_in_the_sum_of_squares() -> None:
    norm = random_norm(64, torch.float16)
    # Over their own size all are 1. An infinite sum would be finite again by then, and every row 0.
    assert torch.equal(rms_norm(torch.full((1, 64), 6e4, dtype=torch.float16), norm), norm.weight.detach()[None])
