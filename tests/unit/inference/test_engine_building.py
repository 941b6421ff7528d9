"""What an engine is built from: limits, placement and memory are checked with their numbers, and said once."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.attention import find_backend
from weft.attention.interface import AttentionSpec
from weft.attention.paged_triton import PagedTriton
from weft.config import EngineConfig, ExecutionConfig, ModelConfig
from weft.errors import ConfigError
from weft.inference import startup
from weft.inference.backing import back
from weft.inference.device_state import DeviceState
from weft.inference.engine import Engine
from weft.inference.placement import place
from weft.inference.runner import ModelRunner
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_sizes import StepSizes
from weft.layers.kernel_choice import batch_invariant
from weft.layers.linear import Linear
from weft.layers.prepacked import PrepackedLinear
from weft.models.checkpoint.interface import GenerationDefaults
from weft.models.checkpoint.source import open_checkpoint
from weft.models.llama import Llama

Build = Callable[..., Engine]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            {"gpu_memory_utilization": 1e-9},
            r"the cache needs 0\.0 GiB \(64 blocks of 16 tokens\) and 0\.0 GiB may be used",
            "lower num_blocks, max_model_len or max_num_seqs, or raise gpu_memory_utilization",
        ),
        (
            {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9},
            r"the cache needs \d{4,}\.\d GiB \(4000000000 blocks of 16 tokens\) and [\d.]+ GiB may be used",
            "max_num_seqs",
        ),
        ({"max_model_len": 65}, "max_model_len=65 exceeds the 64 positions", "trained"),
        ({"policy": "statik"}, "unknown policy='statik'", "did you mean 'static'?"),
        ({"attention_backend": "contigous"}, "unknown attention_backend='contigous'", "did you mean 'contiguous'?"),
        ({"device": "tpu"}, "unknown device='tpu'", "cpu"),
        ({"device": "meta"}, "device='meta' is not supported", "cpu"),
        (
            {"cpu_linear": "prepacked", "dtype": "float16"},
            "cpu_linear='prepacked' cannot be: only float32 and bfloat16 are packed, not float16",
            "'plain' runs anywhere",
        ),
        (
            {"kernel_choice": "few_rows"},
            r"kernel_choice='few_rows' has no effect on operations='auto' on cpu",
            "operations='fused'",
        ),
        (
            {"batch_invariant": True, "kernel_choice": "few_rows"},
            "kernel_choice='few_rows' and batch_invariant=True choose each in their own way",
            "batch_invariant=False",
        ),
        ({"device": "cuda:99"}, r"device='cuda:99' but torch sees \d+ CUDA devices", "cpu"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_engine_that_cannot_be_built_says_why_and_what_would_work(
    options: dict[str, Any], message: str, hint: str, build: Build
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(**options)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"dtype": "bf16"}, "operations='fused' with dtype='bfloat16': .*wrongly", "float32"),
        ({"kernel_choice": "one_pass"}, "kernel_choice='one_pass' has no effect on prepacked", "cpu_linear='plain'"),
        ({"batch_invariant": True}, "batch_invariant=True with fused operations multiplies by plain", "'plain'"),
    ],
    ids=str,
)
def test_fused_operations_in_the_interpreter_are_those_that_were_asked_for(
    options: dict[str, Any], message: str, hint: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("weft.kernels._jit.HAS_TRITON", True)
    with pytest.raises(ConfigError, match=message) as caught:
        build(operations="fused", attention_backend="paged_gather", **options)
    assert hint in str(caught.value.hint)


def _noted(names: list[str]) -> Callable[[str], str]:
    def note(name: str) -> str:
        names.append(name)
        return name

    return note


@pytest.mark.parametrize("choice", ["one_pass", "few_rows", "library"])
def test_a_forced_kernel_is_what_operations_are_made_with(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("weft.kernels._jit.HAS_TRITON", True)
    asked: list[str] = []
    monkeypatch.setattr("weft.inference.backing.forced", _noted(asked))
    monkeypatch.setattr("weft.inference.backing.FusedOperations", lambda _attend, choose: choose)
    execution = ExecutionConfig(operations="fused", kernel_choice=choice)
    placement = place(ModelConfig(model="m", device="cpu", cpu_linear="plain"), None)
    backing = back(execution, placement)
    assert (backing.name, asked, backing.operations(lambda *_: None)) == (f"fused ({choice})", [choice], choice)


def test_batch_invariance_reaches_the_products_and_the_attention_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("weft.kernels._jit.HAS_TRITON", True)
    monkeypatch.setattr("weft.inference.backing.FusedOperations", lambda _attend, choose: choose)
    placement = place(ModelConfig(model="m", device="cpu", cpu_linear="plain"), None)
    backing = back(ExecutionConfig(operations="fused", batch_invariant=True), placement)
    assert (backing.name, backing.batch_invariant) == ("batch-invariant fused", True)
    assert backing.operations(lambda *_: None) == batch_invariant
    asked = PagedTriton(fixed_order=True)
    monkeypatch.setattr(PagedTriton, "in_fixed_order", lambda _self: asked)
    assert backing.attention("paged_triton", (), placement) is asked


def test_a_machine_that_cannot_keep_batch_invariance_says_so_at_start(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "batch-invariant plain operations" in build(batch_invariant=True).description

    def by_place(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, linear.weight, linear.bias) * torch.arange(1, len(x) + 1)[:, None]

    monkeypatch.setattr(Linear, "forward", by_place)
    build(cpu_linear="plain")
    with pytest.raises(ConfigError, match="batch_invariant=True cannot be kept on this machine") as caught:
        build(cpu_linear="plain", batch_invariant=True)
    assert "batch_invariant=False" in str(caught.value.hint)


@pytest.mark.parametrize("backend", ["paged_gather", "contiguous"])
def test_attention_is_looked_at_before_anyone_is_served(
    backend: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(f"weft.attention.{backend}.check_places", lambda specs, _device: seen.append(len(specs)))
    layers = len(build(attention_backend=backend).model.attention_specs)
    assert not seen
    build(attention_backend=backend, batch_invariant=True)
    assert seen == [layers]


def test_a_matrix_that_the_one_kernel_cannot_read_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16, rows of 68 or 34 numbers are no multiple of 16 bytes; rows of 64 and 32 are."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("weft.kernels._jit.HAS_TRITON", True)
    shape = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 64}

    def check(changes: dict[str, int], **options: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | shape | changes))
        config = EngineConfig.of(model=str(tmp_path), device="cpu", dtype="float16", operations="fused", **options)
        startup.check(config, open_checkpoint(str(tmp_path), load_format="dummy"))  # there are no weights to read

    check({}, batch_invariant=True)
    for changes, matrix in (
        ({"hidden_size": 68}, r"layers\.0\.qkv \[192, 68\]"),
        ({"intermediate_size": 34}, r"layers\.0\.mlp\.down \[64, 34\]"),
    ):
        check(changes)
        with pytest.raises(ConfigError, match=rf"cannot multiply by {matrix}: its rows are no multiple of 16 bytes"):
            check(changes, batch_invariant=True)


def test_layers_that_one_cache_cannot_hold_are_refused_before_weights_are_read(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = Llama.attention_spec

    def wider_below(self: Llama, layer: int, window: int | None = None) -> AttentionSpec:
        spec = declared(self, layer, window)
        return spec if layer else replace(spec, num_kv_heads=spec.num_kv_heads * 2)

    monkeypatch.setattr(Llama, "attention_spec", wider_below)
    with pytest.raises(ConfigError, match="layer 0 keeps 4 key heads of 16 and layer 1 2 of 16"):
        startup.check(EngineConfig.of(model=str(tiny_llama), device="cpu"), open_checkpoint(str(tiny_llama)))


def test_a_backend_whose_sums_have_no_fixed_order_serves_unless_it_is_asked_for(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreign:
        def __init__(self) -> None:
            self.name = "foreign"

        def __getattr__(self, name: str) -> object:
            if name == "in_fixed_order":
                raise AttributeError(name)
            return getattr(find_backend("paged_gather"), name)

    monkeypatch.setattr("weft.inference.backing.find_backend", lambda _name: Foreign())
    assert "attention foreign" in build(attention_backend="foreign").description
    with pytest.raises(
        ConfigError, match=r"attention_backend='foreign' cannot run .*: its sums have no fixed order, which batch_inv"
    ) as caught:
        build(attention_backend="foreign", batch_invariant=True)
    assert caught.value.hint == "batch_invariant=False, or attention_backend='auto' takes the first that can"


def test_a_backend_that_cannot_run_either_way_is_no_reason_to_do_without_batch_invariance(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="Triton kernels run on CUDA, not on cpu") as caught:
        build(attention_backend="paged_triton", batch_invariant=True)
    assert caught.value.hint == "attention_backend='auto' takes the first that can"


def test_fused_operations_where_no_kernel_runs_are_an_error(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="operations='fused' are Triton kernels, which do not run on cpu") as caught:
        build(operations="fused")
    assert "operations='plain'" in str(caught.value.hint)


def test_the_pool_takes_what_weights_and_state_leave_and_no_more(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"cpu_linear": "plain", "gpu_memory_utilization": 0.5}
    whole: Any = build(**options)
    weights = sum(parameter.nbytes for parameter in whole.model.parameters())
    state = [tensor for tensor in vars(whole._runner._state).values() if isinstance(tensor, torch.Tensor)]
    counted = DeviceState.bytes_for(whole.limits, whole.geometry)
    assert sum(tensor.nbytes for tensor in state) <= counted
    pool = whole._runner._cache.pool

    def with_room_for(blocks: float) -> None:
        there = weights + 2 * (counted + int(blocks * pool[:, :, 0].nbytes))
        numbers = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": there}
        monkeypatch.setattr("weft.inference.pool_memory.os", SimpleNamespace(sysconf=numbers.__getitem__))

    with_room_for(20.5)
    engine: Any = build(**options)
    assert engine.geometry.num_blocks == 19
    assert engine._runner._cache.pool.shape[2] == 20  # one is scratch
    assert build(num_blocks=19, **options).geometry.num_blocks == 19
    with pytest.raises(ConfigError, match=r"\(20 blocks of 16 tokens\) .* beside 0\.0 GiB of weights"):
        build(num_blocks=20, **options)
    with_room_for(1.5)
    with pytest.raises(ConfigError, match="the cache needs"):
        build(**options)
    weights = weights // 4 - counted * 2
    with_room_for(0)
    with pytest.raises(ConfigError, match=r"the weights take 0\.0 GiB, and 0\.0 GiB are there on cpu"):
        build(**options)


def test_what_steps_take_is_left_out_of_the_pool(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"cpu_linear": "plain", "gpu_memory_utilization": 0.5}
    whole: Any = build(**options)
    weights = sum(parameter.nbytes for parameter in whole.model.parameters())
    block = whole._runner._cache.pool[:, :, 0].nbytes
    there = weights + 2 * (DeviceState.bytes_for(whole.limits, whole.geometry) + 21 * block)
    monkeypatch.setattr(
        "weft.inference.pool_memory.os", SimpleNamespace(sysconf={"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": there}.get)
    )
    assert build(**options).geometry.num_blocks == 20
    monkeypatch.setattr("weft.inference.startup._workspace_bytes", lambda *_: 5 * block)
    assert build(**options).geometry.num_blocks == 15


@pytest.mark.usefixtures("as_users_run_it")  # the runner is none
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_trial_with_the_graphs_that_will_run_is_made_for_a_gpu_alone(
    enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    runner: Any = SimpleNamespace(measure=lambda sizes, *, with_graphs: 7 if with_graphs else 3)
    workspace_bytes: Any = startup._workspace_bytes
    how = None, ExecutionConfig(enforce_eager=enforce_eager)
    assert workspace_bytes(lambda: runner, *how, torch.device("cpu")) == 0
    assert not emptied
    assert workspace_bytes(lambda: runner, *how, torch.device("cuda")) == (3 if enforce_eager else 7)
    assert emptied == [True], "what the trial took goes back before the pool is made"


@pytest.mark.gpu
def test_what_steps_take_is_seen_on_a_gpu(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    measure = ModelRunner.measure

    def noted(runner: ModelRunner, sizes: StepSizes, *, with_graphs: bool) -> int:
        taken.append(measure(runner, sizes, with_graphs=with_graphs))
        return taken[-1]

    monkeypatch.setattr(ModelRunner, "measure", noted)
    build(device="cuda")
    assert taken[0] > 0


def test_cuda_without_a_gpu_is_an_error_and_auto_takes_the_cpu(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device='cuda' but torch sees 0 CUDA devices"):
        build(device="cuda")
    assert build(device="auto").placement.device.type == "cpu"


@pytest.mark.parametrize(("asked", "limit"), [(None, 64), (64, 64), (7, 7)])
def test_the_context_is_what_was_asked_or_all_the_model_has(asked: int | None, limit: int, build: Build) -> None:
    assert build(max_model_len=asked).limits.max_model_len == limit


def test_the_model_brings_its_vocabulary_and_all_its_eos_ids(build: Build) -> None:
    assert (build().vocab_size, build().eos_token_ids) == (97, (1, 5))


@pytest.mark.parametrize("foreign", [-1, 97, 100_000, 2**70])
def test_an_eos_id_that_no_token_has_is_nobodys_token(foreign: int, tiny_llama: Path) -> None:
    """Held back for `min_tokens`, it would be a place in the logits of a neighbour, or none at all."""
    checkpoint = open_checkpoint(str(tiny_llama))
    checkpoint.generation = GenerationDefaults(eos_token_ids=(5, foreign), options={})
    engine = Engine(EngineConfig.of(model=str(tiny_llama), device="cpu", max_num_seqs=2), checkpoint)
    assert engine.eos_token_ids == (5,)
    ends = (96, 0)  # -1 of the second row is the last token of the first, 97 of the first is token 0 of the second
    for token in ends:
        params = SamplingParams(temperature=0, max_tokens=2, min_tokens=2, logit_bias={token: 100})
        engine.add_request(f"says {token}", [token, 9], params)
    said: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            said.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert said == {f"says {token}": [token, token] for token in ends}


def test_what_was_chosen_is_said_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="weft"):
        engine = build()
    assert caplog.messages == [engine.description]
    said = (
        r"llama on cpu in float32 \(.*\); plain operations, prepacked linear layers; "
        r"attention paged_gather, cache \d+ MiB \(64 blocks of 16 tokens\); no graphs; overlap off; policy fcfs"
    )
    assert re.match(said, engine.description)


@pytest.mark.parametrize(
    ("options", "prepacked"),
    [
        ({}, True),
        ({"cpu_linear": "prepacked"}, True),
        ({"cpu_linear": "plain"}, False),
        ({"dtype": "float16"}, False),
    ],
    ids=str,
)
def test_linear_layers_are_packed_unless_plain_ones_are_asked_for_or_needed(
    options: dict[str, Any], prepacked: bool, build: Build
) -> None:
    engine = build(**options)
    assert engine.placement.prepacked is prepacked
    assert any(isinstance(module, PrepackedLinear) for module in engine.model.modules()) is prepacked
    assert any(isinstance(module, Linear) for module in engine.model.modules()) is not prepacked
    assert ("prepacked linear layers" if prepacked else "plain linear layers") in engine.description


def test_without_onednn_auto_is_plain_and_prepacked_an_error(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not build().placement.prepacked
    with pytest.raises(ConfigError, match="cpu_linear='prepacked' cannot be: this build of torch has no oneDNN"):
        build(cpu_linear="prepacked")


def test_prepacked_on_a_gpu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = ModelConfig(model=str(tmp_path), device="cuda", cpu_linear="prepacked")
    with pytest.raises(ConfigError, match="oneDNN packs for CPUs and the model is on cuda"):
        place(config, None)
    assert not place(replace(config, cpu_linear="auto"), None).prepacked
