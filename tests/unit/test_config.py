"""Every option is read by exactly one part, and a wrong one is refused before anything is loaded."""

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

import weft
from weft.config import (
    CPU_LINEARS,
    DTYPE_ALIASES,
    DTYPES,
    KERNEL_CHOICES,
    LOAD_FORMATS,
    OPERATIONS,
    BlockGeometry,
    CacheConfig,
    EngineConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
)
from weft.errors import ConfigError, UnknownArgumentError

PARTS = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "execution": ExecutionConfig}
REQUIRED: dict[type, dict[str, Any]] = {ModelConfig: {"model": "m"}, EngineConfig: {"model": ModelConfig(model="m")}}


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("attention_backends", "attention_backend"),
        ("enforce_eagre", "enforce_eager"),
        ("graph_batch_size", "graph_batch_sizes"),
    ],
)
def test_an_unknown_option_of_the_engine_names_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"LLM got an unknown argument '{typo}'\nhint: .*'{meant}'"):
        EngineConfig.of(model="m", **{typo: 1})


@pytest.mark.parametrize("part", [*PARTS.values(), EngineConfig], ids=lambda part: part.__name__)
def test_an_unknown_field_of_a_part_names_the_nearest(part: type) -> None:
    for item in fields(part):
        with pytest.raises(UnknownArgumentError, match=f"{part.__name__} got .*\nhint: did you mean '{item.name}'"):
            part(**REQUIRED.get(part, {}), **{item.name + "z": 1})


def test_each_flat_name_reaches_the_one_part_that_has_it() -> None:
    homes = [(name, item.name) for name, part in PARTS.items() for item in fields(part)]
    assert len({field for _, field in homes}) == len(homes), "two parts share a field name"
    options: dict[str, Any] = {
        "model": "m",
        "revision": "main",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bf16",
        "device": "cpu",
        "cpu_linear": "plain",
        "seed": 3,
        "max_model_len": 100,
        "logprobs_mode": "processed_logprobs",
        "max_logprob_entries": 5,
        "attention_backend": "contiguous",
        "gpu_memory_utilization": 0.5,
        "policy": "static",
        "max_num_seqs": 5,
        "max_num_batched_tokens": 50,
        "max_chunk_tokens": 7,
        "enforce_eager": True,
        "overlap": False,
        "operations": "fused",
        "kernel_choice": "few_rows",
        "graph_batch_sizes": (1, 5),
        "batch_invariant": True,
    }
    config = EngineConfig.of(**options)
    for part, field in homes:
        if field in options:
            assert getattr(getattr(config, part), field) == options[field]


def test_flat_defaults_are_the_parts_own() -> None:
    assert EngineConfig.of(model="m") == EngineConfig(model=ModelConfig(model="m"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[(name, value) for name in ("max_num_seqs", "max_num_batched_tokens") for value in (0, -1, 1.5, True, "8")],
        *[(name, value) for name in ("max_chunk_tokens", "max_model_len") for value in (0, -1, 1.5, True, "8")],
        *[("gpu_memory_utilization", value) for value in (0, -0.1, 1.01, float("nan"), "0.9", None, True)],
        *[("seed", value) for value in (-1, 2**64, 1.0, True, None)],
        *[("model", value) for value in ("", None, 7)],
        *[("load_format", value) for value in ("pickle", None)],
        *[("dtype", value) for value in ("int8", "float64", ["fp32"])],
        *[(name, value) for name in ("device", "cpu_linear", "attention_backend", "policy") for value in ("", None, 0)],
        *[("max_logprob_entries", value) for value in (0, -1, 1.5, True, 2**63)],
        *[("logprobs_mode", value) for value in ("", None, "raw_logits", ["raw_logprobs"])],
        *[("enforce_eager", value) for value in (None, 1, "yes")],
        *[("overlap", value) for value in (1, "auto")],
        *[("batch_invariant", value) for value in (None, 1, 0, "", "on", ["auto"])],
        *[(name, value) for name in ("operations", "kernel_choice") for value in ("", None, 0, ["fused"])],
        *[("graph_batch_sizes", value) for value in ((), [1, 2], 4, "8")],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option}.*{re.escape(repr(value))}"):
        EngineConfig.of(**{"model": "m", option: value})


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("enforce_eager", 1, "True captures no graphs"),
        ("overlap", "yes", "None overlaps on CUDA only"),
        ("batch_invariant", 1, "'auto' leaves it off: docs/decisions/0019-batch-invariance.md says what it costs"),
        ("graph_batch_sizes", (0,), "None captures about twenty"),
        ("graph_batch_sizes", (None,), "None captures about twenty"),
        ("graph_batch_sizes", (2**63,), "None captures about twenty"),
    ],
)
def test_what_would_work_in_its_place_is_said(option: str, value: object, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(**{"model": "m", option: value})
    assert hint in str(caught.value.hint)


HUGE = 10**5000  # Python writes no number of more than 4,300 digits


@pytest.mark.parametrize("option", ["seed", "max_num_seqs", "gpu_memory_utilization", "overlap", "operations"])
@pytest.mark.parametrize("value", [-HUGE, [HUGE]], ids=["number", "list"])
def test_a_number_that_cannot_be_written_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option} .*(a number of 16610 bits|a list that holds a number)"):
        EngineConfig.of(**{"model": "m", option: value})


@pytest.mark.parametrize("part", PARTS)
def test_a_part_must_be_of_its_own_class(part: str) -> None:
    parts: dict[str, Any] = {"model": ModelConfig(model="m"), part: "smollm2-135m"}
    with pytest.raises(
        ConfigError, match=f"EngineConfig.{part} must be a .*, got 'smollm2-135m'\nhint: EngineConfig.of"
    ):
        EngineConfig(**parts)


@pytest.mark.parametrize(
    ("option", "value"), [("seed", 2**64 - 1), ("seed", 0), ("gpu_memory_utilization", 1), ("max_num_seqs", 1)]
)
def test_the_edges_of_a_range_are_inside(option: str, value: float) -> None:
    EngineConfig.of(**{"model": "m", option: value})


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ("dtype", (*DTYPES, *DTYPE_ALIASES)),
        ("load_format", LOAD_FORMATS),
        ("cpu_linear", CPU_LINEARS),
        ("operations", OPERATIONS),
        ("kernel_choice", KERNEL_CHOICES),
    ],
)
def test_an_unknown_choice_lists_the_known_ones(option: str, known: tuple[str, ...]) -> None:
    for choice in known:
        EngineConfig.of(**{"model": "m", option: choice})
    with pytest.raises(ConfigError, match=f"unknown {option}='nope'\nhint: one of {', '.join(known)}"):
        EngineConfig.of(**{"model": "m", option: "nope"})


def test_a_step_must_hold_one_token_of_each_running_request() -> None:
    EngineConfig.of(model="m", max_num_seqs=8, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=7 is below max_num_seqs=8"):
        EngineConfig.of(model="m", max_num_seqs=8, max_num_batched_tokens=7)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "4", None])
def test_a_batch_size_of_no_step_is_refused_by_name(size: object) -> None:
    with pytest.raises(ConfigError, match=f"graph_batch_sizes.*{re.escape(repr(size))}"):
        EngineConfig.of(model="m", graph_batch_sizes=(1, size))


def test_no_batch_is_captured_that_is_larger_than_what_runs() -> None:
    EngineConfig.of(model="m", max_num_seqs=8, graph_batch_sizes=(3, 8))
    with pytest.raises(ConfigError, match=r"graph_batch_sizes=\(9, 4\) holds 9, .* max_num_seqs=8 "):
        EngineConfig.of(model="m", max_num_seqs=8, graph_batch_sizes=(9, 4))


def test_a_config_cannot_be_changed() -> None:
    config = EngineConfig.of(model="m")
    with pytest.raises(FrozenInstanceError):
        config.model.seed = 1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_are_counted_up(tokens: int, blocks: int) -> None:
    assert BlockGeometry(num_blocks=4, block_size=16, shareable=True).blocks_for(tokens) == blocks


def test_importing_weft_imports_no_heavy_package() -> None:
    heavy = ("torch", "triton", "transformers", "numpy")
    code = f"import sys, weft, weft.config, weft.errors; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    namespace: dict[str, object] = {}
    exec("from weft import *", namespace)
    namespace.pop("__builtins__")
    assert sorted(namespace) == sorted(weft.__all__)
    assert dir(weft) == sorted(weft.__all__)
    assert all(name == "__version__" or getattr(weft, name).__name__ == name for name in weft.__all__)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'LLMs'"):
        _ = weft.LLMs
