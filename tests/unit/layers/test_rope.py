"""Rotary positions: frequencies and rotations are HuggingFace's bit for bit, tables exact to their last cast."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from weft.errors import CheckpointError, UnsupportedCheckpointError
from weft.layers.rope import ROPE_TYPES, RopeConfig, RotaryTable, inverse_frequencies, rotate

CPU = torch.device("cpu")
HEAD_DIM = 64
MODEL = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": 16384}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "other-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.3}},
    "dynamic-odd-length": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 7.1},
        "max_position_embeddings": 1003,
    },
    "llama3": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}},
    "llama3-without-original": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn-attention-factor": {"rope_parameters": YARN | {"attention_factor": 0.8}},
    "yarn-mscale-and-all": {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.2}},
    "yarn-mscale-alone": {"rope_parameters": YARN | {"mscale": 0.707}},
    "yarn-not-truncated": {"rope_parameters": YARN | {"truncate": False}},
    "yarn-betas": {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2}},
    "yarn-equal-betas": {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False}},
    "yarn-integers": {"rope_parameters": YARN | {"factor": 4, "mscale": 1, "mscale_all_dim": 2}},
    "yarn-factor-from-lengths": {"rope_parameters": YARN | {"factor": None}},
    "yarn-factor-one": {"rope_parameters": YARN | {"factor": 1.0}},
    "yarn-without-original": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    "yarn-original-outside": {"rope_parameters": YARN, "original_max_position_embeddings": 2048},
    "older-names": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3.0}},
}


def theirs(fields: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(MODEL | fields)))


def ours(fields: dict[str, Any]) -> RopeConfig:
    return RopeConfig.of(MODEL | fields, HEAD_DIM)


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_frequencies_equal_huggingface_bit_for_bit(fields: dict[str, Any]) -> None:
    frequencies, factor = inverse_frequencies(ours(fields))
    reference = theirs(fields)
    assert torch.equal(frequencies, reference.inv_freq)
    assert factor == reference.attention_scaling


def test_every_scaling_but_the_identities_moves_a_frequency() -> None:
    plain, _ = inverse_frequencies(ours(CONFIGS["default"]))
    unmoved = [
        name for name, fields in CONFIGS.items() if torch.allclose(inverse_frequencies(ours(fields))[0], plain, atol=0)
    ]
    assert unmoved == ["default", "dynamic", "dynamic-odd-length", "yarn-factor-one"]


def test_llama3_keeps_blends_and_divides_its_three_bands() -> None:
    scaled, _ = inverse_frequencies(ours(CONFIGS["llama3"]))
    plain, _ = inverse_frequencies(ours({"rope_theta": 5e5}))
    assert torch.equal(scaled[:15], plain[:15])
    assert ((plain[15:18] / 32 < scaled[15:18]) & (scaled[15:18] < plain[15:18])).all()
    assert torch.equal(scaled[18:], plain[18:] / 32)


def test_factors_divide_each_frequency_by_its_own() -> None:
    factors = [1.0 + pair for pair in range(HEAD_DIM // 2)]
    scaled, factor = inverse_frequencies(ours({"rope_parameters": {"rope_type": "factors", "factors": factors}}))
    plain, _ = inverse_frequencies(ours(CONFIGS["default"]))
    assert torch.equal(scaled, plain / torch.tensor(factors))
    assert factor == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_tables_equal_huggingface_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    table = RotaryTable(ours(CONFIGS[name]), 4096, dtype=dtype, device=CPU)
    cos, sin = theirs(CONFIGS[name])(torch.empty(0, dtype=dtype), torch.arange(4096)[None])
    assert torch.equal(table.cos.repeat(1, 2), cos[0])
    assert torch.equal(table.sin.repeat(1, 2), sin[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cast", ["when built", "afterwards"])
@pytest.mark.parametrize("position", [0, 255, 1857, 4095])
def test_a_low_precision_table_errs_by_its_last_rounding_only(position: int, cast: str, dtype: torch.dtype) -> None:
    built = dtype if cast == "when built" else torch.float32
    table = RotaryTable(ours(CONFIGS["default"]), 4096, dtype=built, device=CPU).to(dtype)
    angles = position * 1e4 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    float32_angle = angles * 2**-22  # what float32 frequencies and angles may add: no more than 4 roundings
    for row, exact in ((table.cos[position], angles.cos()), (table.sin[position], angles.sin())):
        assert row.dtype == dtype
        rounding = exact.abs() * torch.finfo(dtype).eps / 2
        assert ((row.double() - exact).abs() <= rounding + float32_angle).all()


@pytest.mark.parametrize("rope_type", ["longrope", "proportional", "mrope", "su"])
def test_an_unknown_rope_type_is_refused_by_name(rope_type: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=f"'{rope_type}'.*\n.*{', '.join(ROPE_TYPES)}$"):
        ours({"rope_parameters": {"rope_type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize("rope_type", ["", 0, 7, ["linear"]])
def test_a_rope_type_that_is_no_name_is_refused(rope_type: object) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=re.escape(f"rope_type={rope_type!r} is not supported")):
        ours({"rope_parameters": {"rope_type": rope_type}})


POSITIVE = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "rope_theta", "partial_rotary_factor")
NOT_NEGATIVE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
NO_NUMBERS = ["x", "8", True, -1, -0.5, float("nan"), float("inf"), [2.0]]
BAD_OPTIONS: dict[str, list[Any]] = {
    **{name: [*NO_NUMBERS, 0, 0.0] for name in POSITIVE},
    **dict.fromkeys(NOT_NEGATIVE, NO_NUMBERS),
    "original_max_position_embeddings": ["x", 0, -1, 4096.5, True],
    "truncate": ["no", 0],
    "factors": ["x" * 32, 5, [0.0] * 32, ["x"] * 32],
}


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, bad in BAD_OPTIONS.items() for value in bad])
def test_a_bad_parameter_is_refused_by_name(name: str, value: object, rope_type: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"config.json: {name}={value!r} must be ")):
        ours({"rope_parameters": {"rope_type": rope_type, name: value}})


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_parameter_that_is_null_is_one_left_out(name: str) -> None:
    frequencies, _ = inverse_frequencies(ours({"rope_parameters": {"rope_type": "default", name: None}}))
    assert torch.equal(frequencies, inverse_frequencies(ours({}))[0])


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_integers_are_numbers(name: str) -> None:
    parameters = CONFIGS[name]["rope_parameters"] | {"factor": 8.0}
    integers = {key: int(value) if isinstance(value, float) else value for key, value in parameters.items()}
    (mine, mine_factor), (same, same_factor) = (
        inverse_frequencies(ours({"rope_parameters": given})) for given in (parameters, integers)
    )
    assert torch.equal(mine, same)
    assert mine_factor == same_factor


@pytest.mark.parametrize(
    "fields", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_rotating_a_part_of_the_head_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"partial_rotary_factor=0\.5"):
        ours(fields)
    ours({"partial_rotary_factor": 1.0})


@pytest.mark.parametrize(
    ("complete", "parameter"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "factor"),
        *[(LLAMA3, name) for name in ("factor", "low_freq_factor", "high_freq_factor")],
        ({"rope_type": "factors", "factors": [1.0] * 32}, "factors"),
    ],
)
def test_a_scaling_without_its_parameter_names_it(complete: dict[str, Any], parameter: str) -> None:
    ours({"rope_parameters": complete})
    with pytest.raises(CheckpointError, match=f"{complete['rope_type']}' needs '{parameter}'"):
        ours({"rope_parameters": {name: value for name, value in complete.items() if name != parameter}})


@pytest.mark.parametrize("count", [1, 31, 33])
def test_each_pair_needs_its_factor(count: int) -> None:
    with pytest.raises(CheckpointError, match=f"{count} rotary factors for the 32 pairs of head_dim=64"):
        ours({"rope_parameters": {"rope_type": "factors", "factors": [1.0] * count}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_heads", [1, 3])
def test_rotation_equals_huggingface_bit_for_bit(num_heads: int, dtype: torch.dtype) -> None:
    table = RotaryTable(ours(CONFIGS["default"]), 512, dtype=dtype, device=CPU)
    positions = torch.tensor([0, 7, 500, 501, 7, 0, 511])
    x = torch.randn(7, num_heads, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = theirs(CONFIGS["default"])(x, positions[None])
    reference, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    assert torch.equal(rotate(x, positions, table), reference[0])


def test_scores_depend_on_the_distance_alone() -> None:
    table = RotaryTable(ours(CONFIGS["default"]), 512, dtype=torch.float32, device=CPU)
    query, key = torch.randn(2, 1, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> Tensor:
        at = [torch.tensor([position]) for position in (query_position, key_position)]
        return (rotate(query, at[0], table) * rotate(key, at[1], table)).sum()

    assert torch.allclose(score(40, 30), score(410, 400), atol=1e-4)
    assert not torch.allclose(score(40, 30), score(40, 31), atol=1e-2)
