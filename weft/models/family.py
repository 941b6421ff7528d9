"""What a model family gives to the rest of weft: how to read its config, and a module with the one forward path."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from weft.attention.interface import AttentionSpec
from weft.layers.operations import Hidden, Operations
from weft.layers.weights import WeightSlots


@runtime_checkable
class ModelConfig(Protocol):
    """What the engine reads of any family's config. max_model_len: the longest sequence it was made for, in tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


@runtime_checkable
class Model(Protocol):
    """A decoder. It never learns whether it is training, prefilling, decoding, paged or captured."""

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One for each layer."""
        ...

    def weight_slots(self) -> WeightSlots:
        """Where each tensor of a checkpoint goes, under HuggingFace's names."""
        ...

    def forward(
        self, token_ids: Int[Tensor, "T_total"], positions: Int[Tensor, "T_total"], ops: Operations[Hidden]
    ) -> Hidden: ...

    def logits(self, hidden: Hidden, rows: Int[Tensor, "R"], ops: Operations[Hidden]) -> Float[Tensor, "R V"]: ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """One file of `weft/models`.

    read_config: from the mapping of a `config.json`.
    build: an unfilled model for sequences of at most `max_positions` tokens; its parameters hold nothing yet.
    """

    model_type: str
    read_config: Callable[[Mapping[str, Any]], Any]
    build: Callable[[Any, int, torch.dtype, torch.device], nn.Module]
