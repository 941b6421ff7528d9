"""A GGUF gives the model that was converted into it, or is refused with the name of what is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from torch import Tensor
from transformers import PreTrainedModel

from weft.errors import (
    CheckpointError,
    CorruptCheckpointError,
    TensorError,
    UnknownModelTypeError,
    UnsupportedCheckpointError,
)
from weft.layers.rope import RopeConfig, inverse_frequencies
from weft.models.checkpoint.gguf import GgufCheckpoint, hub_name, permute, unpermute
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.load import read_config

Build = Callable[..., PreTrainedModel]
Logits = Callable[[Checkpoint], Tensor]
WriteGguf = Callable[..., Path]

VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama 1 query a kv head": ("llama", {"num_key_value_heads": 4}, {}),
    "llama 2 queries a kv head": ("llama", {"num_key_value_heads": 2}, {}),
    "llama 4 queries a kv head": ("llama", {"num_key_value_heads": 1}, {}),
    "llama 8 heads, 2 kv heads": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2}, {}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}, {}),
    "mistral": ("mistral", {"sliding_window": 4}, {"attention.sliding_window": 4}),
    "llama, whose window of 0 is none": ("llama", {}, {"attention.sliding_window": 0}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3 1 query a kv head": ("qwen3", {"num_key_value_heads": 4}, {}),
}


def rope_of(file: Path) -> RopeConfig:
    config: RopeConfig = read_config(GgufCheckpoint(file)).rope
    return config


@pytest.mark.parametrize(("family", "fields", "metadata"), VARIANTS.values(), ids=VARIANTS)
def test_a_converted_model_is_the_model(
    family: str,
    fields: dict[str, Any],
    metadata: dict[str, Any],
    build: Build,
    write_gguf: WriteGguf,
    logits_of: Logits,
    tokens: list[int],
) -> None:
    model = build(family, **fields)
    architecture = "llama" if family == "mistral" else family
    checkpoint = GgufCheckpoint(write_gguf(model, architecture=architecture, **metadata))
    tensors, parameters = dict(checkpoint.tensors()), dict(model.named_parameters())
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensors[name], parameter) for name, parameter in parameters.items())
    assert checkpoint.config["model_type"] == family
    assert checkpoint.config["tie_word_embeddings"] == ("lm_head.weight" not in parameters)
    assert torch.equal(logits_of(checkpoint), model(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_weights_are_dequantised_and_only_plain_ones_have_a_stored_dtype(
    kind: str, llama: PreTrainedModel, write_gguf: WriteGguf
) -> None:
    quantised = GGMLQuantizationType[kind]
    checkpoint = GgufCheckpoint(write_gguf(llama, kind=quantised))
    assert checkpoint.stored_dtype == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind)
    tensors, state = dict(checkpoint.tensors()), llama.state_dict()
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        expected = dequantize(quantize(state[name].numpy(), quantised), quantised)
        assert torch.equal(tensors[name], torch.from_numpy(expected))
        torch.testing.assert_close(tensors[name], state[name], rtol=0, atol=0.1)
    assert isinstance(checkpoint, Checkpoint)


def test_permute_puts_the_halves_of_a_head_side_by_side() -> None:
    rows = np.arange(16)
    assert permute(rows, 2).tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


@pytest.mark.parametrize("shape", [(32, 5), (32,)], ids=str)
@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
def test_unpermute_undoes_permute(num_heads: int, shape: tuple[int, ...]) -> None:
    weights = np.random.default_rng(0).normal(size=shape)
    assert np.array_equal(unpermute(permute(weights, num_heads), num_heads), weights)
    assert not np.array_equal(unpermute(permute(weights, num_heads), 2 * num_heads), weights)


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "per_layer.weight", "blk.x.ffn_up.weight"])
def test_an_unknown_tensor_keeps_its_name_for_the_loader_to_refuse(
    name: str, llama: PreTrainedModel, write_gguf: WriteGguf, logits_of: Logits
) -> None:
    assert hub_name(name) == name
    with pytest.raises(TensorError, match=f"'{name}'.*no parameter takes it"):
        logits_of(GgufCheckpoint(write_gguf(llama, tensors={name: np.zeros((2, 2), np.float32)})))


@pytest.mark.parametrize("rows", [2, 12])
def test_rows_that_are_no_pairs_of_heads_are_refused(
    rows: int, llama: PreTrainedModel, write_gguf: WriteGguf, logits_of: Logits
) -> None:
    extra = {"blk.9.attn_q.weight": np.zeros((rows, 2), np.float32)}
    with pytest.raises(TensorError, match=f"attn_q.weight' has {rows} rows, which are no pairs of 4 heads"):
        logits_of(GgufCheckpoint(write_gguf(llama, tensors=extra)))


@pytest.mark.parametrize("part", [0.0, 0.00001, 0.001, 0.003, 0.01, 0.02, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_corrupt(part: float, llama: PreTrainedModel, write_gguf: WriteGguf) -> None:
    file = write_gguf(llama)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(CorruptCheckpointError, match=str(file)):
        GgufCheckpoint(file)


def test_a_file_of_another_kind_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    with pytest.raises(CorruptCheckpointError, match=r"model.gguf is not a whole GGUF file"):
        GgufCheckpoint(tmp_path / "model.gguf")


def test_an_unknown_architecture_is_refused_with_the_known_ones(llama: PreTrainedModel, write_gguf: WriteGguf) -> None:
    with pytest.raises(UnknownModelTypeError, match="unknown GGUF architecture 'gpt2'\nhint: known: llama, qwen3"):
        GgufCheckpoint(write_gguf(llama, architecture="gpt2"))


@pytest.mark.parametrize(
    "field",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_metadata_is_named(field: str, llama: PreTrainedModel, write_gguf: WriteGguf) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"lacks the metadata 'llama.{field}'"):
        GgufCheckpoint(write_gguf(llama, **{field: None}))


def test_metadata_with_a_default_may_be_missing(build: Build, write_gguf: WriteGguf, logits_of: Logits) -> None:
    model = build("llama", num_key_value_heads=4)
    left_out = {"attention.head_count_kv": None, "attention.key_length": None}
    logits_of(GgufCheckpoint(write_gguf(model, **left_out)))


def test_the_vocabulary_may_be_counted_instead_of_declared(llama: PreTrainedModel, write_gguf: WriteGguf) -> None:
    tokens = {"vocab_size": None, "tokenizer.ggml.tokens": ["a", "b", "c"]}
    assert GgufCheckpoint(write_gguf(llama, **tokens)).config["vocab_size"] == 3


@pytest.mark.parametrize(("metadata", "ids"), [({}, ()), ({"tokenizer.ggml.eos_token_id": 7}, (7,))])
def test_the_id_that_ends_a_sequence_is_the_tokenizers(
    metadata: dict[str, int], ids: tuple[int, ...], llama: PreTrainedModel, write_gguf: WriteGguf
) -> None:
    assert GgufCheckpoint(write_gguf(llama, **metadata)).generation.eos_token_ids == ids


@pytest.mark.parametrize("field", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
def test_layers_that_differ_are_refused(field: str, llama: PreTrainedModel, write_gguf: WriteGguf) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=f"{field} differs between layers"):
        GgufCheckpoint(write_gguf(llama, **{field: [4, 2]}))


def test_a_mixture_of_experts_is_refused(llama: PreTrainedModel, write_gguf: WriteGguf) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="mixture of experts"):
        GgufCheckpoint(write_gguf(llama, expert_count=8))


def test_integer_tensors_are_refused_by_type(llama: PreTrainedModel, write_gguf: WriteGguf) -> None:
    file = write_gguf(llama, tensors={"blk.0.extra.weight": np.zeros((2, 2), np.int32)})
    with pytest.raises(UnsupportedCheckpointError, match=r"'blk.0.extra.weight' is quantised with I32"):
        list(GgufCheckpoint(file).tensors())


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {}),
        ({"rope.freq_base": 5e5}, {"rope_theta": 5e5}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.0}
            | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_rope_is_read_as_llama_cpp_means_it(
    metadata: dict[str, Any], expected: dict[str, Any], llama: PreTrainedModel, write_gguf: WriteGguf
) -> None:
    hub = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4} | expected}
    given, wanted = rope_of(write_gguf(llama, **metadata)), RopeConfig.of(hub, 16)
    assert torch.equal(inverse_frequencies(given)[0], inverse_frequencies(wanted)[0])
    assert inverse_frequencies(given)[1] == inverse_frequencies(wanted)[1]


def test_rope_factors_are_read_and_are_no_weight(
    llama: PreTrainedModel, write_gguf: WriteGguf, logits_of: Logits, tokens: list[int]
) -> None:
    factors = np.linspace(1, 32, 8, dtype=np.float32)
    checkpoint = GgufCheckpoint(write_gguf(llama, tensors={"rope_freqs.weight": factors}))
    plain = 1 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    assert torch.equal(inverse_frequencies(read_config(checkpoint).rope)[0], plain / torch.from_numpy(factors))
    assert not torch.allclose(logits_of(checkpoint), llama(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.dimension_count": 8}, r"partial_rotary_factor=0\.5"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "rope_type='longrope'"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5},
            r"rope\.scaling\.attn_factor=1\.5",
        ),
        ({"rope.scaling.type": "linear"}, r"lacks the metadata 'llama\.rope\.scaling\.factor'"),
    ],
)
def test_a_rope_that_weft_lacks_is_refused(
    metadata: dict[str, Any], message: str, llama: PreTrainedModel, write_gguf: WriteGguf
) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_of(write_gguf(llama, **metadata))


def test_rope_factors_beside_a_scaling_are_refused(llama: PreTrainedModel, write_gguf: WriteGguf) -> None:
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    with pytest.raises(UnsupportedCheckpointError, match=r"rope_freqs\.weight and rope\.scaling\.type='linear'"):
        rope_of(write_gguf(llama, tensors=factors, **{"rope.scaling.factor": 2.0}))
