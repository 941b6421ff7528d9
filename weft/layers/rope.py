"""Rotary position embedding (Su et al. 2021): frequencies of each scaling type, the cos/sin table, the rotation.

Knows a checkpoint's `rope_parameters` and nothing else of it. Tables are computed in float32 and cast once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from weft.errors import CheckpointError, UnsupportedCheckpointError
from weft.layers.fields import BOOLEAN, MAPPING, NOT_NEGATIVE, POSITIVE, POSITIVE_INTEGER, POSITIVES, Kind, read_field

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_FACTORS = "factors"  # no checkpoint's own name: GGUF's `rope_freqs`, a divisor of each frequency
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    _FACTORS: ("factors",),
}
_OPTIONS = {
    "factor": POSITIVE,
    "factors": POSITIVES,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "attention_factor": POSITIVE,
    "beta_fast": NOT_NEGATIVE,  # 0 is no beta and no mscale, as HuggingFace reads it
    "beta_slow": NOT_NEGATIVE,
    "mscale": NOT_NEGATIVE,
    "mscale_all_dim": NOT_NEGATIVE,
    "truncate": BOOLEAN,
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """A checkpoint's rotary parameters, under HuggingFace's names.

    rope_type: one of ROPE_TYPES, or `factors`, which divides each frequency by a number of its own.
    original_max_position_embeddings: the context the model was trained with, before scaling.
    """

    theta: float
    head_dim: int
    rope_type: str
    max_position_embeddings: int
    original_max_position_embeddings: int
    options: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any], head_dim: int) -> "RopeConfig":
        """Read `rope_parameters` (or the older `rope_scaling` and `rope_theta`) of a `config.json`.

        Raises: UnsupportedCheckpointError for a rope type that weft does not have and for parameters of each layer
            type, CheckpointError for parameters that are missing, too few or not of their kind.
        """
        field = "rope_scaling" if config.get("rope_parameters") in (None, {}) else "rope_parameters"
        options = dict(read_field(config, field, MAPPING, {}))
        if any(name.endswith("_attention") or isinstance(value, Mapping) for name, value in options.items()):
            raise UnsupportedCheckpointError(
                f"config.json: {field}={options!r} is not supported: parameters of each layer type",
                hint="weft runs checkpoints whose layers all rotate alike",
            )
        rope_type = next((options[name] for name in ("rope_type", "type") if options.get(name) is not None), "default")
        if rope_type not in (*ROPE_TYPES, _FACTORS):
            raise UnsupportedCheckpointError(
                f"rope_type={rope_type!r} is not supported", hint="supported: " + ", ".join(ROPE_TYPES)
            )
        for name in _NEEDED.get(rope_type, ()):
            if options.get(name) is None:
                raise CheckpointError(f"rope_type={rope_type!r} needs {name!r}, which the checkpoint does not give")
        for name, kind in _OPTIONS.items():
            read_field(options, name, kind, None)
        factors = options.get("factors", ())
        if rope_type == _FACTORS and len(factors) != head_dim // 2:
            raise CheckpointError(f"{len(factors)} rotary factors for the {head_dim // 2} pairs of head_dim={head_dim}")

        def either(first: Mapping[str, Any], second: Mapping[str, Any], name: str, kind: Kind, default: Any) -> Any:
            return read_field(first, name, kind, read_field(second, name, kind, default))

        partial = either(options, config, "partial_rotary_factor", POSITIVE, 1.0)
        if partial != 1.0:
            raise UnsupportedCheckpointError(f"partial_rotary_factor={partial!r} is not supported, only 1.0")
        limit = read_field(config, "max_position_embeddings", POSITIVE_INTEGER)
        return cls(
            theta=float(either(options, config, "rope_theta", POSITIVE, 10000.0)),
            head_dim=head_dim,
            rope_type=rope_type,
            max_position_embeddings=limit,
            original_max_position_embeddings=either(
                config, options, "original_max_position_embeddings", POSITIVE_INTEGER, limit
            ),
            options=options,
        )


def inverse_frequencies(rope: RopeConfig) -> tuple[Float[Tensor, "{rope.head_dim}//2"], float]:
    """Angle a position advances each pair by, in radians, and the factor on cos and sin; float32, on the CPU.

    Equal to HuggingFace's bit for bit, hence the same operations in the same order.
    """
    base: Tensor = rope.theta ** (torch.arange(0, rope.head_dim, 2, dtype=torch.float) / rope.head_dim)
    plain = 1.0 / base
    match rope.rope_type:
        case "linear":
            return plain / rope.options["factor"], 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(base, rope)
        case "factors":
            return plain / torch.tensor(rope.options["factors"], dtype=torch.float), 1.0
        case _:  # "default", and "dynamic", which is the identity up to the original length
            return plain, 1.0


def _llama3(plain: Float[Tensor, "pairs"], rope: RopeConfig) -> Float[Tensor, "pairs"]:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    factor, low, high = (rope.options[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    scaled = torch.where(wavelengths > original / low, plain / factor, plain)
    smooth = (original / wavelengths - low) / (high - low)
    blend = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, blend, scaled)


def _yarn(base: Float[Tensor, "pairs"], rope: RopeConfig) -> tuple[Float[Tensor, "pairs"], float]:
    """YaRN (Peng et al. 2023): section 3.2, the ramp between interpolating and extrapolating; 3.4, the factor."""
    options, dim, original = rope.options, rope.head_dim, rope.original_max_position_embeddings
    factor = options.get("factor")
    factor = rope.max_position_embeddings / original if factor is None else float(factor)

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = options.get("mscale"), options.get("mscale_all_dim")
        if mscale and mscale_all:
            attention_factor = magnitude(factor, float(mscale)) / magnitude(factor, float(mscale_all))
        else:
            attention_factor = magnitude(factor)

    def dimension_of(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low = dimension_of(float(options.get("beta_fast") or 32))
    high = dimension_of(float(options.get("beta_slow") or 1))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    keep = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float) - low) / span, 0, 1)
    return 1.0 / (factor * base) * (1 - keep) + 1.0 / base * keep, float(attention_factor)


class RotaryTable(nn.Module):
    """cos and sin of each position and pair, computed in float32 and cast once, as HuggingFace casts them at use."""

    cos: Float[Tensor, "S_max pairs"]
    sin: Float[Tensor, "S_max pairs"]

    def __init__(self, rope: RopeConfig, max_positions: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        frequencies, factor = inverse_frequencies(rope)
        positions = torch.arange(max_positions, dtype=torch.float, device=device)
        angles = positions[:, None] * frequencies.to(device)
        self.register_buffer("cos", (angles.cos() * factor).to(dtype), persistent=False)
        self.register_buffer("sin", (angles.sin() * factor).to(dtype), persistent=False)


def rotate(
    x: Float[Tensor, "T_total H D"], positions: Int[Tensor, "T_total"], table: RotaryTable
) -> Float[Tensor, "T_total H D"]:
    """Rotate the pairs (i, i + D/2) of each head by the position's angles; each product and sum rounds in x's dtype."""
    cos, sin = table.cos[positions][:, None], table.sin[positions][:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
