"""A GGUF file: metadata and tensors under llama.cpp's names, given back under HuggingFace's.

Quantised tensors come out as float32; the q/k row order of the `llama` architecture is undone.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from torch import Tensor

from weft.errors import CorruptCheckpointError, TensorError, UnknownModelTypeError, UnsupportedCheckpointError
from weft.models.checkpoint.interface import GenerationDefaults, TokenizerLocation

ARCHITECTURES = ("llama", "qwen3")
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCY_FACTORS = "rope_freqs.weight"
_ROPE_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


class GgufCheckpoint:
    """One `.gguf` file."""

    def __init__(self, file: Path) -> None:
        """Raises: CorruptCheckpointError, UnknownModelTypeError, UnsupportedCheckpointError."""
        self._file = file
        self._reader = _open(file)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = str(self._field("general.architecture"))
        self.config: Mapping[str, Any] = self._read_config()
        self.generation = GenerationDefaults.of(self.config, None)
        kinds = {tensor.tensor_type.name for tensor in self._reader.tensors}
        wide = kinds - {"F32"}  # norms are stored in float32 whatever the matrices are
        self.stored_dtype = _PLAIN.get(wide.pop()) if len(wide) == 1 else None if wide else "float32"
        self.tokenizer = TokenizerLocation(folder=file.parent, gguf_file=file.name)
        self.num_tensors = len(self._reader.tensors)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for tensor in self._reader.tensors:
            if tensor.name != _FREQUENCY_FACTORS:
                yield hub_name(tensor.name), self._read(tensor)

    def _read(self, tensor: ReaderTensor) -> Tensor:
        weights = _dequantize(tensor)
        if self._architecture == "llama":
            for part, heads in ((".attn_q.", "num_attention_heads"), (".attn_k.", "num_key_value_heads")):
                if part in tensor.name:
                    weights = self._unpermute(tensor.name, weights, self.config[heads])
        return torch.from_numpy(np.array(weights, dtype=np.float32))

    def _unpermute(self, name: str, weights: np.ndarray, num_heads: int) -> np.ndarray:
        if weights.shape[0] % (2 * num_heads):
            raise TensorError(f"tensor {name!r} has {weights.shape[0]} rows, which are no pairs of {num_heads} heads")
        return unpermute(weights, num_heads)

    def _read_config(self) -> dict[str, Any]:
        if self._architecture not in ARCHITECTURES:
            raise UnknownModelTypeError(
                f"{self._file}: unknown GGUF architecture {self._architecture!r}",
                hint="known: " + ", ".join(ARCHITECTURES),
            )
        if self._model_field("expert_count", 0):
            raise UnsupportedCheckpointError(f"{self._file} is a mixture of experts, which weft cannot run")
        window = self._model_field("attention.sliding_window", None)
        heads = self._model_field("attention.head_count")
        hidden = self._model_field("embedding_length")
        head_dim = self._model_field("attention.key_length", None) or hidden // max(heads, 1)
        tokens = self._field("tokenizer.ggml.tokens", ())
        config = {
            # llama.cpp files Mistral under `llama`; only a window tells them apart, and only it changes numerics
            "model_type": "mistral" if self._architecture == "llama" and window else self._architecture,
            "vocab_size": self._model_field("vocab_size", None) or len(tokens) or self._field("tokenizer.ggml.tokens"),
            "hidden_size": hidden,
            "intermediate_size": self._model_field("feed_forward_length"),
            "num_hidden_layers": self._model_field("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._model_field("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._model_field("context_length"),
            "rms_norm_eps": self._model_field("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
            "partial_rotary_factor": self._model_field("rope.dimension_count", head_dim) / head_dim,
            "rope_parameters": self._read_rope(),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", None),
        }
        return config | ({"sliding_window": window} if window else {})

    def _read_rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": self._model_field("rope.freq_base", 10000.0)}
        scaling = self._read_rope_scaling()
        if _FREQUENCY_FACTORS not in self._tensors:
            return rope | scaling
        if scaling:
            raise UnsupportedCheckpointError(
                f"{self._file} has {_FREQUENCY_FACTORS} and rope.scaling.type={scaling['rope_type']!r}, not one of them"
            )
        factors = _dequantize(self._tensors[_FREQUENCY_FACTORS])
        return rope | {"rope_type": "factors", "factors": factors.tolist()}

    def _read_rope_scaling(self) -> dict[str, Any]:
        """Under HuggingFace's names; nothing where there is none."""
        prefix = f"{self._architecture}.rope.scaling."
        names = [name.removeprefix(prefix) for name in self._reader.fields if name.startswith(prefix)]
        given = {name: self._field(prefix + name) for name in names if name != "finetuned"}
        # llama.cpp takes a factor without a type for a linear one
        kind = given.pop("type", "linear" if "factor" in given else "none")
        if kind == "none":
            return {}
        for name, value in given.items():
            if name not in _ROPE_SCALING and value != 1.0:  # the factors that weft does not have do nothing at 1
                raise UnsupportedCheckpointError(f"{self._file}: rope.scaling.{name}={value!r} is not supported")
        scaling = {ours: given[name] for name, ours in _ROPE_SCALING.items() if name in given}
        return {"rope_type": kind, "factor": self._field(prefix + "factor")} | scaling

    def _model_field(self, name: str, *default: Any) -> Any:
        value = self._field(f"{self._architecture}.{name}", *default)
        if isinstance(value, list):
            raise UnsupportedCheckpointError(f"{self._file}: {name} differs between layers, which weft cannot run")
        return value

    def _field(self, name: str, *default: Any) -> Any:
        field = self._reader.get_field(name)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise CorruptCheckpointError(f"{self._file} lacks the metadata {name!r}")


def hub_name(name: str) -> str:
    """HuggingFace's name of a GGUF tensor; an unknown name is returned as it is, for the loader to refuse.

    >>> hub_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{suffix}"
    inner = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if inner and inner[2] in _INNER:
        return f"model.layers.{inner[1]}.{_INNER[inner[2]]}.{suffix}"
    return name


def unpermute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from pairs (2i, 2i + 1), as llama.cpp rotates them, back to pairs (i, i + D/2)."""
    pairs = weights.reshape(num_heads, weights.shape[0] // num_heads // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `unpermute`: the row order that llama.cpp stores."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def _open(file: Path) -> GGUFReader:
    try:
        return GGUFReader(file)
    except Exception as error:  # the reader has no error type of its own: a cut file ends in whatever numpy raises
        raise CorruptCheckpointError(f"{file} is not a whole GGUF file: {error}") from error


def _dequantize(tensor: ReaderTensor) -> np.ndarray:
    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:  # how the gguf package says that it knows the type and cannot dequantise it
        kind = GGMLQuantizationType(tensor.tensor_type).name
        raise UnsupportedCheckpointError(f"tensor {tensor.name!r} is quantised with {kind}") from error
