"""Tiny HuggingFace models, their folders in HuggingFace's layout, and weft's logits of what lies in a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from weft.attention.contiguous import BACKEND
from weft.batch import Batch, GroupTables, SamplingRows
from weft.config import CacheConfig, Limits
from weft.layers.operations import PlainOperations
from weft.models.checkpoint.gguf import permute
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.load import load_model

Build = Callable[..., PreTrainedModel]
Logits = Callable[[Checkpoint], Tensor]
WriteGguf = Callable[..., Path]

TOKENS = [5, 90, 3, 3, 17, 0, 64, 41, 7, 12]
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
ADD = {
    bool: gguf.GGUFWriter.add_bool,
    float: gguf.GGUFWriter.add_float32,
    int: gguf.GGUFWriter.add_uint32,
    list: gguf.GGUFWriter.add_array,
    str: gguf.GGUFWriter.add_string,
}


def build_tiny(family: str, **fields: Any) -> PreTrainedModel:
    """A tiny model whose every parameter, biases and norms too, is random."""
    config, model = FAMILIES[family]
    tiny: PreTrainedModel = model(config(**TINY | fields)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in tiny.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
    return tiny


@pytest.fixture(scope="session")
def build() -> Build:
    return build_tiny


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    return TOKENS


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build_tiny("llama")


@pytest.fixture
def folder(llama: PreTrainedModel, tmp_path: Path) -> Path:
    """The tiny Llama, saved in one file."""
    llama.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def logits_of() -> Logits:
    """Float32 logits of TOKENS, computed by weft from a checkpoint."""

    @torch.inference_mode()
    def compute(checkpoint: Checkpoint) -> Tensor:
        model = load_model(checkpoint, max_positions=64, dtype=torch.float32, device=torch.device("cpu"))
        limits = Limits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
        cache = BACKEND.allocate(
            model.attention_specs, BACKEND.geometry(limits, CacheConfig()), torch.float32, torch.device("cpu")
        )
        batch = one_prefill(TOKENS)
        ops = PlainOperations(cache.prepare(batch))
        return model.logits(model.forward(batch.token_ids, batch.positions, ops), batch.logit_rows, ops)

    return compute


def write_tiny_gguf(
    file: Path,
    model: PreTrainedModel,
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tensors: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """The model as llama.cpp converts it. tensors: more of them; metadata: fields to change, None drops one."""
    config = model.config
    fields = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    } | metadata
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in fields.items():
        if value is not None:
            key = name if name.startswith("tokenizer.") else f"{architecture}.{name}"
            ADD[type(value)](writer, key, value)
    known = gguf.MODEL_ARCH.QWEN3 if architecture == "qwen3" else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    for name, parameter in model.named_parameters():  # a tied head is no second one
        weights = parameter.numpy()
        if architecture == "llama" and ".q_proj." in name:
            weights = permute(weights, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            weights = permute(weights, config.num_key_value_heads)
        stored = gguf.GGMLQuantizationType.F32 if weights.ndim == 1 else kind
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(theirs, gguf.quants.quantize(weights, stored), raw_dtype=stored)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    def write(model: PreTrainedModel, **options: Any) -> Path:
        return write_tiny_gguf(tmp_path / "model.gguf", model, **options)

    return write


def one_prefill(tokens: list[int]) -> Batch:
    every, nothing = torch.arange(len(tokens)), torch.empty(0, dtype=torch.int64)
    return Batch(
        token_ids=torch.tensor(tokens),
        positions=every,
        sequence_lengths=torch.tensor([len(tokens)]),
        query_starts=torch.tensor([0, len(tokens)]),
        groups=(GroupTables(block_tables=torch.zeros(1, 1, dtype=torch.int64), slot_mapping=every),),
        logit_rows=every,
        sampling=SamplingRows(temperatures=torch.empty(0), seeds=nothing, positions=nothing, any_noise=False),
    )
