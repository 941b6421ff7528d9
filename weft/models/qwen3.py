"""Qwen3 (Yang et al. 2025): Llama with a norm on each query and key head, and windows on some layers if asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.attention.interface import AttentionSpec
from weft.layers.heads import HeadTransform
from weft.layers.norm import RMSNorm
from weft.layers.rope import RotaryTable
from weft.models.family import Family
from weft.models.llama import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """windows: keys a query sees in each layer, itself included; None sees all."""

    windows: tuple[int | None, ...]

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        config = {"head_dim": 128} | dict(config)
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
        num_layers, first_windowed = config["num_hidden_layers"], config.get("max_window_layers", 28)
        default = ["sliding_attention" if layer >= first_windowed else "full_attention" for layer in range(num_layers)]
        types = config.get("layer_types") or default
        windows = tuple(window if kind == "sliding_attention" else None for kind in types)
        return super().fields_of(config) | {"mlp_bias": False, "windows": windows}


class Qwen3(Llama):
    config: Qwen3Config

    def head_transform(self, rotary: RotaryTable, dtype: torch.dtype, device: torch.device) -> HeadTransform:
        config = self.config
        norms = (RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device) for _ in range(2))
        return HeadTransform(config.num_attention_heads, config.num_key_value_heads, config.head_dim, rotary, *norms)

    def attention_spec(self, layer: int, window: int | None = None) -> AttentionSpec:
        return super().attention_spec(layer, self.config.windows[layer])


FAMILY = Family(model_type="qwen3", read_config=Qwen3Config.read, build=Qwen3)
