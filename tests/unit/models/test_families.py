"""Each family reads HuggingFace's config as HuggingFace does and computes its logits bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from weft.errors import CheckpointError, UnknownModelTypeError, UnsupportedCheckpointError
from weft.models import find_family, known_families
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.load import load_model
from weft.models.checkpoint.source import open_checkpoint
from weft.models.family import Family, Model, ModelConfig

Build = Callable[..., PreTrainedModel]
Logits = Callable[[Checkpoint], Tensor]

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# Every config field that changes numerics, away from its default.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama wide heads": ("llama", {"head_dim": 32}),
    "llama epsilon": ("llama", {"rms_norm_eps": 1e-2}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama attention bias": ("llama", {"attention_bias": True}),
    "llama theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "llama rope scaling": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 4}),
    "qwen3": ("qwen3", {}),
    "qwen3 bias": ("qwen3", {"attention_bias": True}),
    "qwen3 unused window": ("qwen3", {"sliding_window": 3, "use_sliding_window": False}),
    "qwen3 windows above": ("qwen3", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3 windows listed": (
        "qwen3",
        {
            "sliding_window": 3,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
SAME_AS_PLAIN = ("llama", "mistral", "qwen3", "qwen3 unused window")


def test_every_family_has_a_variant_and_the_familys_protocols(build: Build) -> None:
    families = known_families()
    assert families.keys() == {family for family, _ in VARIANTS.values()}
    for name, family in families.items():
        assert isinstance(family, Family)
        config = family.read_config(build(name).config.to_dict())
        assert isinstance(config, ModelConfig)
        assert isinstance(family.build(config, 8, torch.float32, CPU), Model)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, build: Build) -> PreTrainedModel:
    family, fields = VARIANTS[request.param]
    return build(family, **fields)


def test_logits_equal_huggingface_bit_for_bit(
    variant: PreTrainedModel, logits_of: Logits, tokens: list[int], tmp_path: Path
) -> None:
    variant.save_pretrained(tmp_path)
    assert torch.equal(logits_of(open_checkpoint(str(tmp_path))), variant(torch.tensor([tokens])).logits[0])


def test_every_variant_computes_something_of_its_own(
    variant: PreTrainedModel, build: Build, tokens: list[int], request: pytest.FixtureRequest
) -> None:
    plain = build(variant.config.model_type)
    same = torch.equal(plain(torch.tensor([tokens])).logits, variant(torch.tensor([tokens])).logits)
    assert same == (request.node.callspec.params["variant"] in SAME_AS_PLAIN)


@pytest.mark.parametrize("model_type", ["lama", "gpt2", None, 7])
def test_an_unknown_model_type_is_refused_with_the_known_ones(model_type: object) -> None:
    with pytest.raises(UnknownModelTypeError, match=f"model_type={model_type!r}\n.*llama, mistral, qwen3"):
        find_family(model_type)


@pytest.mark.parametrize("field", [name for name in CONFIG if name != "model_type"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
def test_a_missing_config_field_is_named(model_type: str, field: str) -> None:
    read = find_family(model_type).read_config
    read(CONFIG)
    with pytest.raises(CheckpointError, match=f"config.json lacks '{field}'"):
        read({name: value for name, value in CONFIG.items() if name != field})


def test_an_activation_that_weft_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="hidden_act='gelu' is not supported, only 'silu'"):
        find_family("llama").read_config(CONFIG | {"hidden_act": "gelu"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' needs 'factor'"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_family("llama").read_config(CONFIG | fields)


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "yarn"])
def test_the_declared_length_is_never_multiplied_by_a_scaling_factor(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 32}
    config = find_family("llama").read_config(CONFIG | {"max_position_embeddings": 128, "rope_parameters": rope})
    assert config.max_model_len == 128


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", [None, None]),
        ("mistral window", [4, 4]),
        ("qwen3 unused window", [None, None]),
        ("qwen3 windows above", [None, 3]),
        ("qwen3 windows listed", [3, None]),
    ],
)
def test_layers_declare_the_windows_of_their_config(name: str, windows: list[int | None], build: Build) -> None:
    family, fields = VARIANTS[name]
    config = find_family(family).read_config(build(family, **fields).config.to_dict())
    specs = find_family(family).build(config, 8, torch.float32, CPU).attention_specs
    assert [spec.window for spec in specs] == windows


@pytest.mark.parametrize("first_windowed", [0, 1, 2])
@pytest.mark.parametrize("used", [False, True])
def test_qwen3_windows_without_layer_types_are_huggingfaces(used: bool, first_windowed: int) -> None:
    windows = {"sliding_window": 3, "use_sliding_window": used, "max_window_layers": first_windowed}
    theirs = Qwen3Config(**CONFIG | windows)
    config = find_family("qwen3").read_config(CONFIG | windows)
    assert config.windows == tuple(
        theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_window_that_a_config_leaves_out_is_huggingfaces_default(family: str, build: Build) -> None:
    theirs = type(build(family).config)(**CONFIG | {"model_type": family})
    config = find_family(family).read_config(CONFIG)
    specs = find_family(family).build(config, 8, torch.float32, CPU).attention_specs
    assert {spec.window for spec in specs} == {getattr(theirs, "sliding_window", None)}


def test_dummy_weights_are_finite_seeded_and_read_no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    load = {"max_positions": 64, "dtype": torch.float32, "device": CPU}
    first, same, other = (load_model(checkpoint, **load, dummy_seed=seed) for seed in (1, 1, 2))
    weights = [torch.cat([weight.flatten() for weight in model.parameters()]) for model in (first, same, other)]
    assert weights[0].isfinite().all()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    layers = [layer.mlp.down.weight for layer in first.layers]
    assert not torch.equal(*layers), "every parameter draws its own"
