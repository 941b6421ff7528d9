"""Shapes of well-known sizes with random weights, for speed where no checkpoint is: the same weights in every system.

A weight depends on the seed, its place and the device it is drawn on, so systems on one device can be compared token
for token.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError, nearest
from weft.models.checkpoint.interface import GenerationDefaults, TokenizerLocation

_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 16_384,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    # For trying a benchmark where there is no time or no GPU; no figure is about it.
    "llama-tiny": _LLAMA
    | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "llama-190m": _LLAMA
    | {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "vocab_size": 32_000,
        "tie_word_embeddings": True,
    },
    "llama-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "llama-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
}


class ShapeCheckpoint:
    """A `Checkpoint` that nobody trained. `stored_dtype`: what the weights are drawn in."""

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.config: Mapping[str, Any] = config
        self.generation = GenerationDefaults(eos_token_ids=(), options={})
        self.stored_dtype: str | None = str(dtype).removeprefix("torch.")
        self.tokenizer = TokenizerLocation(folder=Path())  # it has none: prompts are token ids
        self._dtype, self._device, self._seed = dtype, device, seed
        with torch.device("meta"):
            model = _huggingface_model(config, dtype)
        # Parameters, not the state: a tied head is there once.
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.num_tensors = len(self._shapes)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Normal weights of deviation 0.02, norms at 1: activations stay finite at any depth."""
        for place, (name, shape) in enumerate(self._shapes.items()):
            if len(shape) == 1:
                yield name, torch.ones(shape, dtype=self._dtype, device=self._device)
                continue
            generator = torch.Generator(device=self._device).manual_seed(self._seed + place)
            weight = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
            yield name, weight.mul_(0.02)

    def huggingface_model(self) -> Any:
        """HuggingFace's model of this shape with these weights."""
        with torch.device(self._device):
            model = _huggingface_model(self.config, self._dtype)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, weight in self.tensors():
                parameters[name].copy_(weight)
        return model.eval()


def shape_config(name: str) -> Mapping[str, Any]:
    """Raises: ConfigError with the known names."""
    if name not in SHAPES:
        raise ConfigError(f"unknown shape={name!r}", hint=nearest(name, SHAPES))
    return SHAPES[name]


def _huggingface_model(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields), dtype=dtype)
