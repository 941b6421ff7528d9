"""Qwen3 (Yang et al. 2025): Llama with a norm on each query and key head, and windows on some layers if asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.attention.interface import AttentionSpec
from weft.errors import CheckpointError
from weft.layers.fields import BOOLEAN, INTEGER, POSITIVE_INTEGER, Kind, read_field
from weft.layers.heads import HeadTransform
from weft.layers.norm import RMSNorm
from weft.layers.rope import RotaryTable
from weft.models.family import Family
from weft.models.llama import Llama, LlamaConfig

_TYPES = _FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """windows: keys a query sees in each layer, itself included; None sees all."""

    windows: tuple[int | None, ...]

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # The architecture has no bias in its MLP: whatever a config says of one, HuggingFace does not read it.
        config = {"head_dim": 128, "sliding_window": 4096} | dict(config) | {"mlp_bias": False}
        fields = super().fields_of(config)
        num_layers = fields["num_hidden_layers"]
        declared = read_field(config, "sliding_window", POSITIVE_INTEGER, None)
        window = declared if read_field(config, "use_sliding_window", BOOLEAN, False) else None
        first_windowed = read_field(config, "max_window_layers", INTEGER, 28)
        default = [_SLIDING if window is not None and layer >= first_windowed else _FULL for layer in range(num_layers)]
        kind = Kind(
            f"{_FULL!r} or {_SLIDING!r} for each of {num_layers} layers",
            lambda types: isinstance(types, list) and len(types) == num_layers and all(t in _TYPES for t in types),
        )
        types = read_field(config, "layer_types", kind, default)
        if window is None and _SLIDING in types:  # HuggingFace loads it, and raises at the first token
            used = config.get("use_sliding_window")
            raise CheckpointError(
                f"config.json: layer_types names {_SLIDING!r}, and use_sliding_window={used!r} with "
                f"sliding_window={declared!r} gives it no window"
            )
        return fields | {"windows": tuple(window if layer == _SLIDING else None for layer in types)}


class Qwen3(Llama):
    config: Qwen3Config

    def head_transform(self, rotary: RotaryTable, dtype: torch.dtype, device: torch.device) -> HeadTransform:
        config = self.config
        norms = (RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device) for _ in range(2))
        return HeadTransform(config.num_attention_heads, config.num_key_value_heads, config.head_dim, rotary, *norms)

    def attention_spec(self, layer: int, window: int | None = None) -> AttentionSpec:
        return super().attention_spec(layer, self.config.windows[layer])


FAMILY = Family(model_type="qwen3", read_config=Qwen3Config.read, build=Qwen3)
