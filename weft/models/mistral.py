"""Mistral (Jiang et al. 2023): Llama whose layers all see a sliding window of keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.attention.interface import AttentionSpec
from weft.layers.fields import POSITIVE_INTEGER, read_field
from weft.models.family import Family
from weft.models.llama import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """sliding_window: keys a query sees, itself included; None sees all."""

    sliding_window: int | None

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # The architecture has no biases: whatever a config says of them, HuggingFace does not read it.
        config = {"sliding_window": 4096} | dict(config) | {"attention_bias": False, "mlp_bias": False}
        window = read_field(config, "sliding_window", POSITIVE_INTEGER, None)
        return super().fields_of(config) | {"sliding_window": window}


class Mistral(Llama):
    config: MistralConfig

    def attention_spec(self, layer: int, window: int | None = None) -> AttentionSpec:
        return super().attention_spec(layer, self.config.sliding_window)


FAMILY = Family(model_type="mistral", read_config=MistralConfig.read, build=Mistral)
