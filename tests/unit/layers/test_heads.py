"""A packed projection becomes HuggingFace's queries, keys and values, each token on its own."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from weft.layers.heads import HeadTransform
from weft.layers.norm import RMSNorm
from weft.layers.rope import RopeConfig, RotaryTable

CPU = torch.device("cpu")
HEAD_DIM = 16
POSITIONS = torch.tensor([5, 0, 31, 5, 6])
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(1, 1), (4, 4), (6, 2), (8, 1)]


def build(num_query_heads: int, num_kv_heads: int, dtype: torch.dtype, *, normed: bool) -> HeadTransform:
    rope = RopeConfig.of({"max_position_embeddings": 32}, HEAD_DIM)
    rotary = RotaryTable(rope, 32, dtype=dtype, device=CPU)
    norms = [RMSNorm(HEAD_DIM, 1e-6, dtype=dtype, device=CPU) for _ in range(2)] if normed else []
    with torch.no_grad():
        for seed, norm in enumerate(norms):
            norm.weight.copy_(torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(seed)))
    return HeadTransform(num_query_heads, num_kv_heads, HEAD_DIM, rotary, *norms)


def packed(heads: HeadTransform, dtype: torch.dtype) -> Tensor:
    width = (heads.num_query_heads + 2 * heads.num_kv_heads) * HEAD_DIM
    return torch.randn(len(POSITIONS), width, generator=torch.Generator().manual_seed(3)).to(dtype)


def theirs(heads: HeadTransform, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As HuggingFace's Qwen3Attention (LlamaAttention, where there are no norms) on the separate projections."""
    query_width, kv_width = heads.num_query_heads * HEAD_DIM, heads.num_kv_heads * HEAD_DIM
    query, key, value = (
        part.contiguous()[None].view(1, len(POSITIONS), -1, HEAD_DIM)
        for part in qkv.split((query_width, kv_width, kv_width), dim=-1)
    )
    query, key = norm_as_theirs(query, heads.query_norm), norm_as_theirs(key, heads.key_norm)
    cos, sin = (table[POSITIONS].repeat(1, 2)[None] for table in (heads.rotary.cos, heads.rotary.sin))
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    return query[0].transpose(0, 1), key[0].transpose(0, 1), value[0]


def norm_as_theirs(x: Tensor, norm: RMSNorm | None) -> Tensor:
    if norm is None:
        return x
    reference = LlamaRMSNorm(HEAD_DIM, norm.epsilon).to(x.dtype)
    reference.load_state_dict(norm.state_dict())
    return reference(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), HEADS)
def test_heads_equal_huggingface_bit_for_bit(
    num_query_heads: int, num_kv_heads: int, normed: bool, dtype: torch.dtype
) -> None:
    heads = build(num_query_heads, num_kv_heads, dtype, normed=normed)
    qkv = packed(heads, dtype)
    for ours, reference in zip(heads(qkv, POSITIONS), theirs(heads, qkv), strict=True):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_a_token_never_depends_on_its_neighbours(normed: bool) -> None:
    heads = build(6, 2, torch.float32, normed=normed)
    qkv = packed(heads, torch.float32)
    together = heads(qkv, POSITIONS)
    for token in range(len(POSITIONS)):
        alone = heads(qkv[token : token + 1], POSITIONS[token : token + 1])
        assert all(torch.equal(one[0], many[token]) for one, many in zip(alone, together, strict=True))


def test_values_are_neither_normed_nor_rotated() -> None:
    heads = build(6, 2, torch.float32, normed=True)
    qkv = packed(heads, torch.float32)
    _, _, value = heads(qkv, POSITIONS)
    assert torch.equal(value.flatten(1), qkv[:, -2 * HEAD_DIM :])


def test_the_input_is_left_as_it_was() -> None:
    heads = build(6, 2, torch.float32, normed=True)
    qkv = packed(heads, torch.float32)
    before = qkv.clone()
    heads(qkv, POSITIONS)
    assert torch.equal(qkv, before)
