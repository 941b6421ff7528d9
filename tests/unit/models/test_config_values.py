"""A value of a config.json that cannot be meant is refused by name, before any weight is read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.errors import CheckpointError, UnsupportedCheckpointError
from weft.models import find_family

FAMILIES = ("llama", "mistral", "qwen3")
CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NOT_POSITIVE_INTEGERS = ["131", -1, 0, 96.5, 96.0, True, [96], {}]
NOT_POSITIVE_NUMBERS = ["1e-5", 0, -1, True, float("nan"), float("inf"), 10**400, [1.0]]
NOT_BOOLEANS = [0, 1, "false", [], 0.0]
BAD: list[tuple[str, list[Any], str]] = [
    *[(name, [*NOT_POSITIVE_INTEGERS, None], "a positive integer") for name in CONFIG],
    *[(name, NOT_POSITIVE_INTEGERS, "a positive integer") for name in ("num_key_value_heads", "head_dim")],
    ("original_max_position_embeddings", NOT_POSITIVE_INTEGERS, "a positive integer"),
    ("rms_norm_eps", [*NOT_POSITIVE_NUMBERS, None], "a positive finite number"),
    ("rope_theta", NOT_POSITIVE_NUMBERS, "a positive finite number"),
    ("tie_word_embeddings", NOT_BOOLEANS, "true or false"),
    ("rope_parameters", ["x", "", 0, [], ["linear"]], "a mapping"),
    ("rope_scaling", ["x", 7], "a mapping"),
]
BAD_OF_A_FAMILY: list[tuple[str, str, list[Any], str]] = [
    ("llama", "mlp_bias", NOT_BOOLEANS, "true or false"),
    ("llama", "attention_bias", NOT_BOOLEANS, "true or false"),
    ("qwen3", "attention_bias", NOT_BOOLEANS, "true or false"),
    ("qwen3", "use_sliding_window", NOT_BOOLEANS, "true or false"),
    ("qwen3", "max_window_layers", ["28", 1.5, True], "an integer"),
    ("qwen3", "sliding_window", NOT_POSITIVE_INTEGERS, "a positive integer"),
    ("mistral", "sliding_window", NOT_POSITIVE_INTEGERS, "a positive integer"),
    (
        "qwen3",
        "layer_types",
        ["x", [], ["full_attention"], ["full_attention"] * 3, ["full_attention", "conv"], ["full_attention", []], 2],
        "'full_attention' or 'sliding_attention' for each of 2 layers",
    ),
]
CASES = [
    *[(family, name, value, kind) for family in FAMILIES for name, values, kind in BAD for value in values],
    *[(family, name, value, kind) for family, name, values, kind in BAD_OF_A_FAMILY for value in values],
]


@pytest.mark.parametrize(("family", "name", "value", "kind"), CASES)
def test_a_bad_value_is_refused_by_name(family: str, name: str, value: object, kind: str) -> None:
    message = f"config.json: {name}={value!r} must be {kind}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        find_family(family).read_config(CONFIG | {name: value})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_theta", 10000),
        ("rope_theta", None),
        ("rope_parameters", {}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 10000, "factor": 8}),
        ("rope_scaling", None),
        ("num_key_value_heads", None),
        ("tie_word_embeddings", None),
        ("attention_bias", None),
        ("mlp_bias", None),
        ("sliding_window", None),
        ("use_sliding_window", None),
        ("max_window_layers", None),
        ("layer_types", None),
        ("layer_types", ["full_attention", "full_attention"]),
    ],
)
def test_a_good_value_passes(family: str, name: str, value: object) -> None:
    find_family(family).read_config(CONFIG | {name: value})


def test_only_layers_that_have_a_window_are_windowed() -> None:
    types = ["sliding_attention", "full_attention"]
    read, windowed = find_family("qwen3").read_config, CONFIG | {"use_sliding_window": True, "sliding_window": 7}
    assert read(windowed).windows == (None, None)  # of 28 layers and more, if nothing is said
    assert read(windowed | {"max_window_layers": 1}).windows == (None, 7)
    assert read(windowed | {"layer_types": types}).windows == (7, None)
    assert read(CONFIG | {"sliding_window": 7, "max_window_layers": 0}).windows == (None, None)


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_sliding_window": False, "sliding_window": 7}, {"use_sliding_window": True, "sliding_window": None}],
)
def test_a_windowed_layer_without_a_window_is_refused(changes: dict[str, Any]) -> None:
    """It would see every key, where HuggingFace raises at the first token."""
    with pytest.raises(CheckpointError, match=r"layer_types names 'sliding_attention', and .* gives it no window"):
        find_family("qwen3").read_config(CONFIG | {"layer_types": ["full_attention", "sliding_attention"]} | changes)


@pytest.mark.parametrize(
    ("family", "name"), [("mistral", "attention_bias"), ("mistral", "mlp_bias"), ("qwen3", "mlp_bias")]
)
def test_a_bias_that_a_family_does_not_have_is_not_read(family: str, name: str) -> None:
    assert getattr(find_family(family).read_config(CONFIG | {name: True}), name) is False


def test_heads_that_leave_no_width_are_refused() -> None:
    with pytest.raises(CheckpointError, match="head_dim=0 must be a positive integer"):
        find_family("llama").read_config(CONFIG | {"hidden_size": 2})


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_parameters_of_each_layer_type_are_refused(name: str) -> None:
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": None}
    with pytest.raises(UnsupportedCheckpointError, match=f"{name}=.*'full_attention'.*of each layer type"):
        find_family("qwen3").read_config(CONFIG | {name: nested})


def test_a_bad_value_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "llama", "vocab_size": "131"}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensor
    with pytest.raises(CheckpointError, match="vocab_size='131' must be a positive integer"):
        weft.LLM(str(tmp_path), device="cpu")
