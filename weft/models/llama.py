"""The Llama architecture (Touvron et al. 2023): pre-norm blocks, rotary positions, grouped heads, SwiGLU.

Config, module and weight names; how attention happens and where keys live is the operations' business.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from weft.attention.interface import AttentionSpec
from weft.errors import CheckpointError, UnsupportedCheckpointError
from weft.layers.fields import BOOLEAN, POSITIVE, POSITIVE_INTEGER, read_field
from weft.layers.heads import HeadTransform
from weft.layers.linear import Embedding, Linear
from weft.layers.mlp import GatedMLP
from weft.layers.norm import RMSNorm
from weft.layers.operations import Hidden, Operations
from weft.layers.rope import RopeConfig, RotaryTable
from weft.layers.stack import Stack
from weft.layers.weights import WeightSlots
from weft.models.family import Family


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The fields of `config.json` that change numerics, under its own names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim={self.head_dim} is odd; rotation works on pairs")

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """From the mapping of a `config.json`.

        Raises: CheckpointError for a field that is missing or not of its kind, UnsupportedCheckpointError for one
            that weft cannot honour.
        """
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedCheckpointError(f"hidden_act={activation!r} is not supported, only 'silu'")
        try:
            return cls(**cls.fields_of(config))
        except KeyError as error:
            raise CheckpointError(f"config.json lacks {error.args[0]!r}") from error

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Constructor arguments; a family with more fields adds them here."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        switches = ("tie_word_embeddings", "attention_bias", "mlp_bias")
        fields = {name: read_field(config, name, POSITIVE_INTEGER) for name in sizes}
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        head_dim = read_field(config, "head_dim", POSITIVE_INTEGER, hidden // heads)
        return {
            **fields,
            "num_key_value_heads": read_field(config, "num_key_value_heads", POSITIVE_INTEGER, heads),
            "head_dim": head_dim,
            "rms_norm_eps": read_field({"rms_norm_eps": 1e-6} | dict(config), "rms_norm_eps", POSITIVE),
            **{name: read_field(config, name, BOOLEAN, False) for name in switches},
            "rope": RopeConfig.of(config, head_dim),
        }

    @property
    def max_model_len(self) -> int:
        """The declared limit, never multiplied by a scaling factor: checkpoints state it after scaling."""
        return self.rope.max_position_embeddings


class Block(nn.Module):
    """The parameters of one layer; Llama.forward says how they meet."""

    def __init__(self, config: LlamaConfig, heads: HeadTransform, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        query_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        packed = (query_width, kv_width, kv_width)
        self.attention_norm = RMSNorm(hidden, epsilon, dtype=dtype, device=device)
        self.qkv = Linear(hidden, packed, bias=config.attention_bias, dtype=dtype, device=device)
        self.heads = heads
        self.output = Linear(query_width, (hidden,), bias=config.attention_bias, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(hidden, epsilon, dtype=dtype, device=device)
        self.mlp = GatedMLP(hidden, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device)


class Llama(nn.Module):
    """One forward path for training, prefill and decode."""

    def __init__(self, config: LlamaConfig, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        rotary = RotaryTable(config.rope, max_positions, dtype=dtype, device=device)
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = Stack(
            Block(config, self.head_transform(rotary, dtype, device), dtype=dtype, device=device)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        tied = config.tie_word_embeddings
        own = torch.device("meta") if tied else device  # a tied head takes no memory of its own
        self.head = Linear(config.hidden_size, (config.vocab_size,), dtype=dtype, device=own)
        if tied:
            self.head.weight = self.embedding.weight

    def head_transform(self, rotary: RotaryTable, dtype: torch.dtype, device: torch.device) -> HeadTransform:
        """Rotation only; a family with per-head norms adds them here."""
        config = self.config
        return HeadTransform(config.num_attention_heads, config.num_key_value_heads, config.head_dim, rotary)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(self.attention_spec(layer) for layer in range(self.config.num_hidden_layers))

    def attention_spec(self, layer: int, window: int | None = None) -> AttentionSpec:
        """Full causal attention; a family with windows passes one for the layers that have it."""
        config = self.config
        return AttentionSpec(
            num_query_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=window,
        )

    def forward(
        self, token_ids: Int[Tensor, "T_total"], positions: Int[Tensor, "T_total"], ops: Operations[Hidden]
    ) -> Hidden:
        hidden = ops.embed(self.embedding, token_ids)
        for index, layer in enumerate(self.layers):
            qkv = ops.norm_linear(hidden, layer.attention_norm, layer.qkv)
            attended = ops.attend(index, qkv, positions, layer.heads)
            hidden = ops.linear_add(attended, layer.output, hidden)
            hidden = ops.norm_mlp_add(hidden, layer.mlp_norm, layer.mlp)
        return hidden

    def logits(self, hidden: Hidden, rows: Int[Tensor, "R"], ops: Operations[Hidden]) -> Float[Tensor, "R V"]:
        return ops.logits(hidden, rows, self.norm, self.head)

    def weight_slots(self) -> WeightSlots:
        slots = WeightSlots()
        slots.add(self.embedding, "model.embed_tokens")
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            slots.add(layer.attention_norm, f"{prefix}.input_layernorm")
            slots.add(layer.qkv, f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
            slots.add(layer.output, f"{attention}.o_proj")
            slots.add(layer.mlp_norm, f"{prefix}.post_attention_layernorm")
            slots.add(layer.mlp.gate_up, f"{mlp}.gate_proj", f"{mlp}.up_proj")
            slots.add(layer.mlp.down, f"{mlp}.down_proj")
            if layer.heads.query_norm is not None:
                slots.add(layer.heads.query_norm, f"{attention}.q_norm")
            if layer.heads.key_norm is not None:
                slots.add(layer.heads.key_norm, f"{attention}.k_norm")
        slots.add(self.norm, "model.norm")
        if self.config.tie_word_embeddings:
            slots.add_copy("lm_head.weight", of="model.embed_tokens.weight")
        else:
            slots.add(self.head, "lm_head")
        return slots


FAMILY = Family(model_type="llama", read_config=LlamaConfig.read, build=Llama)
