"""The plain operations are HuggingFace's Llama modules bit for bit, at equal shapes and the same weights."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaRMSNorm

from weft.layers.heads import HeadTransform
from weft.layers.linear import Embedding, Linear
from weft.layers.mlp import GatedMLP
from weft.layers.norm import RMSNorm
from weft.layers.operations import Operations, PlainOperations

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, VOCABULARY = 64, 96, 160
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [1, 7, 32]


@pytest.fixture(scope="module", params=[False, True], ids=["no bias", "bias"])
def reference(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,  # 32 columns: under 16 a packed product rounds otherwise than those of its parts
        attention_bias=request.param,
        mlp_bias=request.param,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    return model


@pytest.fixture(params=DTYPES, ids=str)
def theirs(request: pytest.FixtureRequest, reference: LlamaForCausalLM) -> LlamaForCausalLM:
    return deepcopy(reference).to(request.param)  # which rounds in place, and the next dtype would have the rounded


@pytest.fixture(params=LENGTHS, ids=lambda length: f"{length} tokens")
def hidden(request: pytest.FixtureRequest, theirs: LlamaForCausalLM) -> Tensor:
    return torch.randn(request.param, HIDDEN, generator=torch.Generator().manual_seed(1)).to(theirs.dtype)


def no_attention(layer: int, qkv: Tensor, positions: Tensor, heads: HeadTransform) -> Tensor:
    raise AssertionError("this test asks for no attention")


OPS = PlainOperations(no_attention)


def norm_of(module: LlamaRMSNorm) -> RMSNorm:
    norm = RMSNorm(len(module.weight), module.variance_epsilon, dtype=module.weight.dtype, device=CPU)
    norm.load_state_dict(module.state_dict())
    return norm


def linear_of(*modules: nn.Linear) -> Linear:
    parts, first = tuple(module.out_features for module in modules), modules[0]
    dtype, biased = first.weight.dtype, first.bias is not None
    linear = Linear(first.in_features, parts, bias=biased, dtype=dtype, device=CPU)
    packed = {"weight": torch.cat([module.weight for module in modules])}
    if biased:
        packed["bias"] = torch.cat([module.bias for module in modules])
    linear.load_state_dict(packed)
    return linear


def mlp_of(module: LlamaMLP) -> GatedMLP:
    down = module.down_proj
    mlp = GatedMLP(HIDDEN, INTERMEDIATE, bias=down.bias is not None, dtype=down.weight.dtype, device=CPU)
    mlp.gate_up = linear_of(module.gate_proj, module.up_proj)
    mlp.down = linear_of(down)
    return mlp


def embedding_of(module: nn.Embedding) -> Embedding:
    embedding = Embedding(*module.weight.shape, dtype=module.weight.dtype, device=CPU)
    embedding.load_state_dict(module.state_dict())
    return embedding


def test_plain_operations_are_operations() -> None:
    assert isinstance(OPS, Operations)


def test_embed_equals_huggingface(theirs: LlamaForCausalLM) -> None:
    token_ids = torch.tensor([0, VOCABULARY - 1, 3, 3])
    module = theirs.model.embed_tokens
    assert torch.equal(OPS.embed(embedding_of(module), token_ids), module(token_ids))


def test_norm_linear_equals_huggingface(theirs: LlamaForCausalLM, hidden: Tensor) -> None:
    layer = theirs.model.layers[0]
    projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    normed = layer.input_layernorm(hidden[None])
    separate = torch.cat([projection(normed) for projection in projections], dim=-1)
    packed = OPS.norm_linear(hidden, norm_of(layer.input_layernorm), linear_of(*projections))
    assert torch.equal(packed, separate[0])


def test_linear_add_equals_huggingface(theirs: LlamaForCausalLM, hidden: Tensor) -> None:
    output = theirs.model.layers[0].self_attn.o_proj
    residual = hidden.flip(0)
    expected = residual[None] + output(hidden[None])
    assert torch.equal(OPS.linear_add(hidden, linear_of(output), residual), expected[0])


def test_norm_mlp_add_equals_huggingface(theirs: LlamaForCausalLM, hidden: Tensor) -> None:
    layer = theirs.model.layers[0]
    expected = hidden[None] + layer.mlp(layer.post_attention_layernorm(hidden[None]))
    added = OPS.norm_mlp_add(hidden, norm_of(layer.post_attention_layernorm), mlp_of(layer.mlp))
    assert torch.equal(added, expected[0])


def test_logits_equal_huggingface_and_are_float32(theirs: LlamaForCausalLM, hidden: Tensor) -> None:
    expected = theirs.lm_head(theirs.model.norm(hidden[None])).float()
    logits = OPS.logits(hidden, torch.arange(len(hidden)), norm_of(theirs.model.norm), linear_of(theirs.lm_head))
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected[0])


def test_logits_are_those_of_the_rows_asked_for_in_their_order(theirs: LlamaForCausalLM) -> None:
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2)).to(theirs.dtype)
    norm, head = norm_of(theirs.model.norm), linear_of(theirs.lm_head)
    every, rows = OPS.logits(hidden, torch.arange(5), norm, head), torch.tensor([4, 0, 4, 2, 1])
    torch.testing.assert_close(OPS.logits(hidden, rows, norm, head), every[rows])


def test_an_operation_leaves_its_input_as_it_was(theirs: LlamaForCausalLM, hidden: Tensor) -> None:
    layer, before = theirs.model.layers[0], hidden.clone()
    OPS.norm_mlp_add(hidden, norm_of(layer.post_attention_layernorm), mlp_of(layer.mlp))
    OPS.linear_add(hidden, linear_of(layer.self_attn.o_proj), hidden)
    assert torch.equal(hidden, before)
