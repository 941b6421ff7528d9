"""Every experiment, end to end on a tiny model; wrong outputs are found, and no speed is compared with them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.benchmark.experiments import known_experiments
from weft.benchmark.experiments import offline as offline_experiment
from weft.benchmark.measure import Answer, Outcome
from weft.benchmark.progress import show_bars, show_nothing
from weft.benchmark.row import Row
from weft.benchmark.shapes import ShapeCheckpoint
from weft.benchmark.systems import find_system, known_systems
from weft.benchmark.workload import Lengths, Workload, mixed_workload
from weft.cli import main
from weft.errors import ConfigError

SMALL: dict[str, dict[str, Any]] = {
    "offline": {"requests": 5, "in_flight": 3, "prompts": "4,9", "outputs": "3:6", "repetitions": 2},
    "continuous": {"requests": 16, "in_flight": 4, "prompts": "4,9", "short": 2, "long": 20},
    "memory": {"requests": 6, "in_flight": 3, "prompts": "4,20", "outputs": "3:20", "block_size": 4},
    "steps": {
        "shape": "llama-tiny",
        "device": "cpu",
        "dtype": "float32",
        "batch": "1,3",
        "context": "40",
        "steps": 5,
        "repetitions": 2,
    },
    "prefill": {
        "shape": "llama-tiny",
        "device": "cpu",
        "dtype": "float32",
        "prompts": "6,40",
        "budget": 16,
        "tokens": 80,
        "repetitions": 2,
    },
    "gates": {"slower": "0,10", "runs": 2, "blocks": 8, "measures": 1},
    "ladder": {
        "shape": "llama-tiny",
        "device": "cpu",
        "dtype": "float32",
        "in_flight": "1",
        "rungs": "1,4",
        "repetitions": 1,
        "slow_requests": 2,
    },
    "nights": {"lower": "0,30", "histories": 2, "nights": 50},
    "plan": {"shape": "llama-tiny", "max_num_seqs": 128},
    "text": {"tokens": 40, "repetitions": 2},
    "scheduler": {"pools": "64,256", "running": 8, "waiting": 32, "steps": 5, "lookup_tokens": 64, "block_size": 4},
}


NAMING = ("offline", "continuous", "memory")  # a model
GATES = known_experiments()["gates"]
ROW = Row(experiment="gates", system="weft")
MEASURED = ROW.of("speed", [1.0], "x")


def run(name: str, **options: Any) -> list[Row]:
    experiment = known_experiments()[name]
    return list(experiment.run(experiment.options(**(SMALL[name] | options)), show_nothing))


def by_metric(rows: list[Row], system: str | None = None) -> dict[str, Row]:
    return {row.metric: row for row in rows if system in (None, row.system)}


def test_every_experiment_is_tried_here() -> None:
    assert sorted((*SMALL, "kernels")) == sorted(known_experiments()), "kernels needs a GPU: test_kernels.py"


def test_offline_all_systems_say_the_same_tokens(tiny_model: str) -> None:
    rows = run("offline", model=tiny_model, systems="weft,hf_generate,hf_continuous,hf_static")
    for system in ("weft", "hf_continuous", "hf_static"):
        assert by_metric(rows, system)["requests equal to hf_generate"].value == 5
    assert {row.system for row in rows if row.metric == "output tokens"} == set(known_systems())
    for name in ("hf_generate", "hf_continuous"):
        assert by_metric(rows, "weft")[f"tokens/s over {name}"].target is not None
    assert all(row.repetitions == 2 for row in rows if row.unit == "tokens/s")


WORKLOAD = mixed_workload(
    requests=4, in_flight=2, prompts=Lengths.parse("3"), outputs=Lengths.parse("5"), vocab_size=9, seed=0
)


def compared(systems: dict[str, Any], *, dtype: str = "float32") -> list[Row]:
    outcomes = offline_experiment.measure(systems, WORKLOAD, repetitions=2, progress=show_nothing, failures={})
    versions = {name: system.version for name, system in systems.items()}
    base = Row(experiment="offline", dtype=dtype)
    return offline_experiment.compare(outcomes, WORKLOAD, base, versions, {})


def test_a_ratio_is_that_of_the_throughputs(fake: Any) -> None:
    systems = {"weft": fake(0.25), "hf_generate": fake(1.0)}
    rows = compared(systems)
    assert by_metric(rows, "weft")["tokens/s over hf_generate"].value == pytest.approx(4.0)
    assert by_metric(rows, "weft")["time to first token p50"].value == 250
    assert [system.runs for system in systems.values()] == [3, 3], "a warm-up and two repetitions"


@pytest.mark.parametrize("wrong", ["weft", "hf_continuous"])
def test_no_speed_is_compared_with_a_wrong_output(wrong: str, fake: Any) -> None:
    faults = {name: (2,) if name == wrong else () for name in ("weft", "hf_generate", "hf_continuous")}
    rows = compared({name: fake(0.5, wrong=places) for name, places in faults.items()})
    unequal = by_metric(rows, wrong)["requests equal to hf_generate"]
    assert (unequal.value, unequal.verdict) == (3, "missed")
    assert not any(row.metric == f"tokens/s over {wrong}" for row in rows)
    assert any("tokens/s over" in row.metric for row in rows) is (wrong != "weft")


def test_in_bfloat16_unequal_requests_are_counted_and_compared_all_the_same(fake: Any) -> None:
    rows = compared({"weft": fake(0.5, wrong=(2,)), "hf_generate": fake(1.0)}, dtype="bfloat16")
    assert by_metric(rows, "weft")["requests equal to hf_generate"].verdict == ""
    assert "tokens/s over hf_generate" in by_metric(rows, "weft")


def test_a_system_that_answers_nothing_has_no_speed(fake: Any) -> None:
    class Silent(fake):  # type: ignore[misc]
        def run(self, workload: Workload, advance: Any) -> Outcome:
            return Outcome(answers=(Answer(token_ids=(), times=()),) * len(workload.jobs), elapsed_s=1.0)

    rows = compared({"weft": fake(0.5), "hf_generate": fake(0.5), "hf_continuous": Silent(0.5)})
    assert [(row.metric, row.value) for row in rows if row.system == "hf_continuous"] == [
        ("requests equal to hf_generate", 0)
    ]


@pytest.mark.parametrize("at", ["loading", "running"])
def test_a_system_that_runs_out_of_memory_takes_no_rows_of_the_others(
    at: str, fake: Any, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hungry(fake):  # type: ignore[misc]
        def run(self, workload: Workload, advance: Any) -> Outcome:
            raise torch.OutOfMemoryError("too much")

    def opened(name: str) -> Any:
        def open_system(*given: object) -> Any:
            if name == "hf_generate" and at == "loading":
                raise torch.OutOfMemoryError("too much")
            return Hungry(1.0) if name == "hf_generate" else fake(0.25 if name == "weft" else 1.0)

        return open_system

    monkeypatch.setattr(offline_experiment, "find_system", opened)
    rows = run("offline", model=tiny_model, systems="hf_generate,weft,hf_continuous")
    assert [row.system for row in rows if row.failed] == ["hf_generate"]
    assert [row.metric for row in rows if row.system == "hf_generate"] == ["not measured"]
    assert by_metric(rows, "weft")["tokens/s over hf_continuous"].value == pytest.approx(4.0)


def test_continuous_compares_policies_that_say_the_same(tiny_model: str) -> None:
    rows = by_metric(run("continuous", model=tiny_model), "weft fcfs over static")
    assert rows["requests equal"].verdict == "met"
    assert {"sooner done", "time to first token p50 lower"} <= set(rows)


@pytest.mark.parametrize("options", [{}, {"requests": 1}, {"block_size": 1}, {"in_flight": 6}])
def test_memory_holds_the_tokens_in_flight_and_a_block_a_request(options: dict[str, Any], tiny_model: str) -> None:
    rows = by_metric(run("memory", model=tiny_model, **options))
    assert rows["peak over tokens and a block a request"].verdict == "met"
    assert rows["peak over tokens in flight"].value >= 1
    assert rows["bytes of a token"].value == 2 * 3 * 2 * 16 * 4  # key and value, layers, heads, dimension, float32
    if options.get("block_size") == 1:
        assert rows["peak over tokens in flight"].value == 1, "blocks of one token waste nothing"


def test_scheduler_measures_each_pool_and_the_lookup() -> None:
    rows = run("scheduler")
    assert len({row.case for row in rows}) == 4
    assert all(row.value > 0 for row in rows)
    assert [row.metric for row in rows if row.unit != "µs"] == ["slowest decode step over fastest"]
    assert sum(row.target is not None for row in rows) == 2, "the step of 256 running is a target, this one is not"


def test_text_measures_each_way_whole_and_streamed(text_model: str) -> None:
    rows = run("text", model=text_model)
    assert [row.metric for row in rows] == 2 * [*["a token", "last quarter over first"] * 3, "a token"]
    assert all(row.value > 0 and row.target is not None and row.repetitions == 2 for row in rows)
    assert len({row.case for row in rows}) == 8


def test_a_shape_gives_every_system_the_same_weights() -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    checkpoint = ShapeCheckpoint(config, dtype=torch.float32, device=torch.device("cpu"), seed=3)
    first, second = dict(checkpoint.tensors()), dict(checkpoint.tensors())
    assert len(first) == checkpoint.num_tensors
    parameters = dict(checkpoint.huggingface_model().named_parameters())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], parameters[name]) for name in first)
    assert "lm_head.weight" not in first, "a tied head is not a weight of its own"


def test_a_shape_runs_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.benchmark import shapes

    tiny = shapes.SHAPES["llama-190m"] | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 97}
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": tiny | heads})
    rows = run("offline", shape="tiny", systems="weft,hf_generate", repetitions=1)
    assert by_metric(rows)["requests equal to hf_generate"].value == 5
    assert {row.model for row in rows} == {"tiny"}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("offline", {"systems": "weft,nobody"}, "unknown system='nobody'"),
        ("offline", {"systems": "weft,weft"}, "twice"),
        ("offline", {"requests": 0}, "requests"),
        ("offline", {"outputs": "none"}, "lengths"),
        ("offline", {"shape": "llama-9b"}, "unknown shape='llama-9b'"),
        ("continuous", {"one_in": 0}, "one_in"),
        ("memory", {"repetitions": 0}, "repetitions"),
        ("scheduler", {"pools": "8,x"}, "pools"),
        ("scheduler", {"pools": "8"}, "does not hold"),
        ("text", {"tokens": 0}, "tokens"),
        ("gates", {"noise": float("nan")}, "noise=nan"),
        ("gates", {"process": float("inf")}, "process=inf"),
        ("gates", {"slower": ""}, "slower='' is no list"),
        ("gates", {"seed": -1}, "seed must be 0 or more, got -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(name, **options)


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown system"):
        find_system("vllm")


def test_bars_close_when_they_are_full(capsys: pytest.CaptureFixture[str]) -> None:
    advance = show_bars("stage", 2)
    advance()
    advance()
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(SMALL))
def test_the_command_prints_a_table_and_appends_rows(
    name: str,
    tiny_model: str,
    text_model: str,
    json_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.benchmark.provenance.calibrate", lambda device: {"copy_gb_per_s": 1.0})
    unnamed = ("gates", "ladder", "nights", "plan", "prefill", "scheduler", "steps")
    model = {} if name in unnamed else {"model": text_model if name == "text" else tiny_model}
    given = SMALL[name] | model | ({"systems": "weft"} if name == "offline" else {})
    arguments = [part for key, value in given.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    assert main(["bench", name, *arguments, "--json", str(json_file)]) == 0
    assert known_experiments()[name].summary in capsys.readouterr().out
    records = [json.loads(line) for line in json_file.read_text(encoding="utf-8").splitlines()]
    assert {record["experiment"] for record in records} == {name}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_nothing_is_measured_before_the_first_row_is_asked_for(
    name: str, tiny_model: str, text_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the rates of the device that stand beside a number would be those after it, of a device that is not free."""
    stages = []

    def progress(stage: str, total: int) -> Any:
        stages.append(stage)
        return show_nothing(stage, total)

    model = {"text": {"model": text_model}}.get(name, {"model": tiny_model} if name in NAMING else {})
    experiment = known_experiments()[name]
    given = SMALL[name] | model | ({"systems": "weft"} if name == "offline" else {})
    with monkeypatch.context() as patch:
        patch.setattr("weft.inference.engine.Engine.__init__", lambda *given, **named: pytest.fail("weights are read"))
        rows = experiment.run(experiment.options(**given), progress)
    assert stages == []
    assert len(list(rows)) > 0
    assert stages != []


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([MEASURED], 0),
        ([MEASURED, ROW.unmeasured("no kernel here", failed=False)], 0),
        ([MEASURED, ROW.unmeasured("out of memory", failed=True)], 1),
        ([ROW.unmeasured("no kernel here", failed=False)], 1),
        ([ROW.of("forward not measured", [1], "")], 1),
        ([], 1),
    ],
)
def test_the_status_says_whether_all_that_was_begun_was_measured(
    rows: list[Row], status: int, json_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.benchmark.provenance.calibrate", lambda device: {"copy_gb_per_s": 1.0})
    monkeypatch.setattr("weft.benchmark.experiments.gates.EXPERIMENT", replace(GATES, run=lambda *given: iter(rows)))
    assert main(["bench", "gates", "--json", str(json_file)]) == status
    assert len(json_file.read_text().splitlines() if rows else []) == len(rows), "what there is stays"


def test_what_was_measured_is_shown_even_if_it_cannot_be_written(
    json_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.benchmark.row.append_json", full)
    monkeypatch.setattr("weft.benchmark.provenance.calibrate", lambda device: {"copy_gb_per_s": 1.0})
    assert main(["bench", "gates", "--runs", "1", "--json", str(json_file)]) == 2
    out, err = capsys.readouterr()
    assert "instrument broken" in out
    assert "No space left on device" in err


def test_the_command_names_its_experiments_and_refuses_a_bad_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(f"weft bench {name}" in out for name in SMALL)
    assert main(["bench", "memory", "--json", "no/such/folder/rows.jsonl"]) == 2
    assert "--json" in capsys.readouterr().err
