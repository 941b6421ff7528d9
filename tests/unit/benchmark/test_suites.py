"""The standing workloads are what their description says, and run end to end on a tiny shape."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.benchmark.decode_steps import read_bytes
from weft.benchmark.engine_options import parse_engine_options
from weft.benchmark.experiments.offline import EXPERIMENT, OfflineOptions
from weft.benchmark.experiments.plan import PlanOptions
from weft.benchmark.experiments.steps import StepsOptions
from weft.benchmark.measure import Answer, Outcome, best_rows_of
from weft.benchmark.progress import show_nothing
from weft.benchmark.published import PEERS, PROTOTYPE_STEPS, READ_TB_PER_S, READY_S
from weft.benchmark.row import Row, Target
from weft.benchmark.served_model import open_model
from weft.benchmark.shapes import SHAPES, ShapeCheckpoint
from weft.benchmark.suite_run import SuiteRun, SuiteSettings
from weft.benchmark.suites import SUITES, Case, Suite, chosen_suites
from weft.benchmark.systems.hf_static import HuggingFaceStatic
from weft.benchmark.systems.weft import WeftSystem
from weft.benchmark.workload import Workload
from weft.errors import ConfigError, WeftError

# suite: shape, and for each case requests in flight, requests, bounds of prompts, bounds of outputs
DESCRIBED = {
    "ladder": (
        "llama-190m",
        [(1, 8, 64, 256, 32, 96), (8, 32, 64, 256, 32, 96), (32, 128, 64, 256, 32, 96), (64, 256, 64, 256, 32, 96)],
    ),
    "mixed64": (
        "llama-1b",
        [(1, 4, 128, 128, 256, 256), (64, 64, 32, 1024, 32, 256), (256, 512, 128, 512, 128, 128)],
    ),
    "big": ("llama-8b", [(1, 3, 128, 128, 128, 128), (64, 128, 256, 1024, 64, 192), (256, 512, 256, 1024, 64, 192)]),
}


TWO = Suite(
    name="ladder",
    shape="llama-190m",
    cases=(
        Case(in_flight=1, requests=2, prompts="4", outputs="3"),
        Case(in_flight=8, requests=16, prompts="4:9", outputs="3"),
    ),
)


@pytest.fixture
def small_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.benchmark.suites.SUITES", {"ladder": TWO})


def tiny(**options: Any) -> list[Row]:
    given = {"suite": "ladder", "shape": "llama-tiny", "device": "cpu", "dtype": "float32"}
    return list(EXPERIMENT.run(OfflineOptions(**(given | options)), show_nothing))


def metrics(rows: list[Row], system: str, case: str = "") -> dict[str, Row]:
    return {row.metric: row for row in rows if row.system == system and case in row.case}


def test_the_suites_are_those_described() -> None:
    assert list(SUITES) == list(DESCRIBED)
    for name, (shape, cases) in DESCRIBED.items():
        suite = SUITES[name]
        assert suite.shape == shape
        assert [(case.in_flight, case.requests) for case in suite.cases] == [case[:2] for case in cases]


@pytest.mark.parametrize("name", DESCRIBED)
def test_lengths_reach_their_bounds_and_a_seed_names_them(name: str) -> None:
    for case, (in_flight, requests, low, high, shortest, longest) in zip(
        SUITES[name].cases, DESCRIBED[name][1], strict=True
    ):
        workload = case.workload(vocab_size=100, seed=0)
        assert workload == case.workload(vocab_size=100, seed=0)
        assert workload != case.workload(vocab_size=100, seed=1)
        assert (workload.in_flight, len(workload.jobs)) == (in_flight, requests)
        prompts = [len(job.prompt_token_ids) for job in workload.jobs]
        outputs = [job.num_output_tokens for job in workload.jobs]
        for lengths, least, most in ((prompts, low, high), (outputs, shortest, longest)):
            assert least <= min(lengths) <= max(lengths) <= most
            if requests >= 64:  # a uniform draw of so many comes near both ends
                assert min(lengths) <= least + (most - least) / 10
                assert max(lengths) >= most - (most - least) / 10
        assert workload.max_num_tokens <= 4096


def test_every_case_has_its_published_figure_and_target() -> None:
    assert set(PEERS) == {(suite.name, case.in_flight) for suite in SUITES.values() for case in suite.cases}
    assert {name: [PEERS[name, case.in_flight].factor for case in SUITES[name].cases] for name in SUITES} == {
        "ladder": [4, 3, 3, 3],
        "mixed64": [1.8, 1.4, 1.4],
        "big": [1.2, 1.1, 1.0],
    }
    over = {key: peer.over_huggingface for key, peer in PEERS.items() if peer.over_huggingface}
    assert over == {("ladder", 1): 20, ("ladder", 64): 8}
    assert set(READY_S) <= set(SHAPES)


@pytest.mark.parametrize("cell", PROTOTYPE_STEPS, ids=lambda cell: "-".join(map(str, cell)))
def test_the_limits_of_the_prototypes_steps_are_what_reading_takes(cell: tuple[str, int, int]) -> None:
    """Two derivations of one number, so that neither a figure nor the formula is mistyped: equal to three digits."""
    shape, batch, context = cell
    noted = PROTOTYPE_STEPS[cell]
    milliseconds = read_bytes(SHAPES[shape], itemsize=2, batch=batch, context=context) / READ_TB_PER_S / 1e9
    assert milliseconds == pytest.approx(noted.limit_ms, rel=0.003, abs=0.0006)
    assert noted.limit_ms < noted.best_ms <= noted.fused_ms + 0.01


def test_every_shape_counts_the_parameters_it_has() -> None:
    for tied in (True, False):
        shape = dict(SHAPES["llama-tiny"]) | {"tie_word_embeddings": tied}
        checkpoint = ShapeCheckpoint(shape, dtype=torch.float32, device=torch.device("cpu"), seed=0)
        sizes = {name: weight.nbytes for name, weight in checkpoint.tensors()}
        unread = 0 if tied else sizes["model.embed_tokens.weight"]
        assert read_bytes(shape, itemsize=4, batch=0, context=0) == sum(sizes.values()) - unread


@pytest.mark.usefixtures("small_suites")
def test_a_suite_runs_end_to_end_and_both_say_the_same() -> None:
    rows = tiny()
    for width, requests in ((1, 2), (8, 16)):
        case = f"ladder: {width} in flight"
        mine = metrics(rows, "weft", case)
        assert (mine["requests equal to hf_static"].value, mine["requests equal to hf_static"].verdict) == (
            requests,
            "met",
        )
        peer = metrics(rows, "hf_static", case)
        ratio = mine["output tokens"].value / peer["output tokens"].value
        assert mine["tokens/s over hf_static"].value == pytest.approx(ratio)
        assert mine["output tokens"].repetitions == 2
        assert mine["output tokens"].spread is not None
        assert mine["steps without a graph"].value >= 2 * 3 * requests / width, "on a CPU no step has one"
    whole = metrics(rows, "weft")
    parts = [row.value for metric, row in whole.items() if metric.startswith("until ready, ")]
    assert 0 < sum(parts) < whole["until ready"].value
    assert not any("vLLM" in row.metric for row in rows), "no published figure is about the tiny shape"
    assert {row.system_version for row in rows if row.system == "hf_static"} != {""}


@pytest.mark.usefixtures("small_suites")
def test_huggingface_may_answer_fewer_but_a_full_batch() -> None:
    rows = tiny(hf_requests=1, repetitions=1)
    for width, requests in ((1, 2), (8, 16)):
        equal = metrics(rows, "weft", f"ladder: {width} in flight")["requests equal to hf_static"]
        assert (equal.value, equal.unit) == (width, f"of {width}")
        peer = metrics(rows, "hf_static", f"ladder: {width} in flight")["output tokens"]
        assert f"first {width} of {requests}" in peer.notes


@pytest.mark.usefixtures("small_suites")
def test_fields_of_the_engine_reach_it_and_make_another_system_of_it() -> None:
    """Or its rows would stand in the history of the engine as it comes, and in its place."""
    rows = tiny(cases="1", systems="weft", repetitions=1, engine="policy=static,attention_backend=contiguous")
    name = "weft, policy=static, attention_backend=contiguous"
    assert {row.system for row in rows} == {name}
    assert "contiguous" in metrics(rows, name)["until ready"].notes
    assert "output tokens" in metrics(rows, name, "1 in flight")


@pytest.mark.usefixtures("small_suites")
def test_an_engine_that_fails_is_a_row_with_the_reason_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **named: object) -> None:
        raise ConfigError("the cache needs a GiB more")

    monkeypatch.setattr("weft.inference.pool_memory.PoolMemory.fit", fail)
    rows = tiny(cases="1", repetitions=1, hf_requests=1)
    unmeasured = metrics(rows, "weft")["not measured"]
    assert "a GiB more" in unmeasured.notes
    assert [row for row in rows if row.failed] == [unmeasured]
    assert "output tokens" in metrics(rows, "hf_static")


def settings(**options: Any) -> SuiteSettings:
    given: dict[str, Any] = {
        "suites": (),
        "systems": ("weft", "hf_static"),
        "shape": "llama-tiny",
        "dtype": "float32",
        "device": "cpu",
        "seed": 0,
        "repetitions": 2,
        "hf_requests": None,
        "engine": {},
    }
    return SuiteSettings(**(given | options))


def with_systems(run: SuiteRun, monkeypatch: pytest.MonkeyPatch, weft: Any, huggingface: Any) -> list[Row]:
    monkeypatch.setattr(run, "_open_weft", lambda: weft)
    monkeypatch.setattr(run, "_open_huggingface", lambda: huggingface)
    return list(run.rows())


def test_targets_stand_beside_the_figures_they_are_of(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SuiteRun(TWO, settings(), show_nothing)
    monkeypatch.setattr(run, "_peers", {case: PEERS["ladder", case.in_flight] for case in TWO.cases})
    rows = with_systems(run, monkeypatch, fake(0.001), fake(0.1))
    one = metrics(rows, "weft", "1 in flight")
    over = one["tokens/s over vLLM's 591"]
    assert over.value == pytest.approx(2 * 3 / 0.003 / 591)
    assert (over.target, over.verdict) == (Target(relation=">=", value=4.0), "missed")
    assert "another run" in over.notes
    assert one["time to first token p50"].target == Target(relation="<=", value=6)
    assert one["tokens/s over hf_static"].target == Target(relation=">=", value=20.0)
    assert metrics(rows, "weft", "8 in flight")["tokens/s over hf_static"].target is None
    assert not any(row.target for row in rows if row.system == "hf_static")


def test_a_wrong_token_in_float32_leaves_no_ratio(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = with_systems(SuiteRun(TWO, settings(), show_nothing), monkeypatch, fake(0.001, wrong=(1,)), fake(0.1))
    mine = metrics(rows, "weft", "8 in flight")
    assert (mine["requests equal to hf_static"].value, mine["requests equal to hf_static"].verdict) == (15, "missed")
    assert "tokens/s over hf_static" not in mine


def test_what_runs_out_of_memory_ends_alone(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hungry(fake):  # type: ignore[misc]
        def run(self, workload: Workload, advance: Callable[[], None]) -> Outcome:
            if workload.in_flight > 1:
                raise torch.OutOfMemoryError("too much")
            return super().run(workload, advance)  # type: ignore[no-any-return]

    rows = with_systems(SuiteRun(TWO, settings(), show_nothing), monkeypatch, fake(0.001), Hungry(0.1))
    assert "too much" in metrics(rows, "hf_static", "8 in flight")["not measured"].notes
    assert [row.metric for row in rows if row.failed] == ["not measured"]
    assert "tokens/s over hf_static" in metrics(rows, "weft", "1 in flight")
    assert "output tokens" in metrics(rows, "weft", "8 in flight")


def test_a_short_answer_has_no_speed(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(fake):  # type: ignore[misc]
        def run(self, workload: Workload, advance: Callable[[], None]) -> Outcome:
            return Outcome(answers=(Answer(token_ids=(1,), times=(0.1,)),) * len(workload.jobs), elapsed_s=1.0)

    rows = with_systems(SuiteRun(TWO, settings(), show_nothing), monkeypatch, Short(0.1), fake(0.1))
    assert not any(row.unit in ("tokens/s", "x") for row in rows if row.system == "weft")
    assert metrics(rows, "weft", "1 in flight")["requests answered in full"].value == 0


def test_the_better_repetition_is_told_and_both_are_in_the_spread() -> None:
    def outcome(step: float) -> Outcome:
        return Outcome(answers=(Answer(token_ids=(1, 2), times=(step, 3 * step)),), elapsed_s=3 * step)

    rows = {row.metric: row for row in best_rows_of([outcome(0.2), outcome(0.1)], Row(experiment="e"), {})}
    assert rows["output tokens"].value == pytest.approx(2 / 0.3)
    assert rows["time between tokens p50"].value == pytest.approx(200)
    assert rows["output tokens"].repetitions == 2
    assert rows["output tokens"].spread == pytest.approx((2 / 0.3 - 2 / 0.6) / (3 / 0.6))


def test_a_closed_loop_never_holds_more_than_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(model="llama-tiny", shape="llama-tiny", dtype="float32", device="cpu", seed=0)
    workload = Case(in_flight=3, requests=7, prompts="4:9", outputs="2:6").workload(vocab_size=512, seed=0)
    system = WeftSystem(model, workload, closed_loop=True, max_model_len=64, max_num_seqs=5)
    inside: set[str] = set()
    ended: set[str] = set()
    widths: list[int] = []
    expected: list[int] = []
    add, step = system.engine.add_request, system.engine.step

    def adding(request_id: str, *arguments: Any) -> None:
        inside.add(request_id)
        add(request_id, *arguments)

    def stepping() -> Any:
        widths.append(len(inside))
        expected.append(min(3, 7 - len(ended)))
        outputs = step()
        done = {output.request_id for output in outputs if output.finished}
        ended.update(done)
        inside.difference_update(done)
        return outputs

    monkeypatch.setattr(system.engine, "add_request", adding)
    monkeypatch.setattr(system.engine, "step", stepping)
    outcome = system.run(workload, lambda: None)
    assert outcome.is_complete(workload)
    assert widths == expected, "a new one enters as one leaves, none before"
    late = outcome.answers[-1]
    assert 0 < late.entered_s < late.times[0]
    assert outcome.first_token_s[-1] == late.times[0] - late.entered_s


def test_static_batches_stop_each_answer_at_its_own_length() -> None:
    model = open_model(model="llama-tiny", shape="llama-tiny", dtype="float32", device="cpu", seed=0)
    workload = Case(in_flight=3, requests=7, prompts="4:9", outputs="2:6").workload(vocab_size=512, seed=0)
    ended = []
    outcome = HuggingFaceStatic(model, workload).run(workload, lambda: ended.append(1))
    assert outcome.is_complete(workload)
    assert len(ended) == 7
    assert all(len(answer.times) == len(answer.token_ids) for answer in outcome.answers)
    entered = [answer.entered_s for answer in outcome.answers]
    assert entered == sorted(entered)
    assert len(set(entered)) == 3, "three batches"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"suite": "huge"}, "unknown suite='huge'"),
        ({"suite": ""}, "unknown suite=''"),
        ({"suite": "ladder,ladder"}, "twice"),
        ({"suite": "ladder", "cases": "3"}, "no case of suite='ladder' has 3 in flight"),
        ({"suite": "ladder", "cases": "one"}, "no list of numbers"),
        ({"suite": "ladder", "cases": "0"}, "positive"),
        ({"suite": "ladder", "requests": 0}, "requests"),
        ({"suite": "ladder", "requests": 5}, "requests=5 is the suite's own"),
        ({"suite": "ladder", "model": "other"}, "model='other' is the suite's own"),
        ({"suite": "ladder", "hf_requests": -1}, "hf_requests"),
        ({"suite": "ladder", "systems": "weft,hf_continuous"}, "with a suite"),
        ({"suite": "ladder", "systems": "weft,nobody"}, "unknown system"),
        ({"suite": "ladder", "repetitions": -1}, "repetitions"),
        ({"suite": "ladder", "engine": "overlap"}, "no name=value"),
        ({"cases": "1"}, "belongs to a suite"),
        ({"engine": "overlap=true"}, "belongs to a suite"),
        ({"hf_requests": 4}, "belongs to a suite"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OfflineOptions(**options)


def test_who_gives_an_option_of_suites_alone_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        OfflineOptions(engine="overlap=true")
    assert caught.value.hint == "one of --suite big,ladder,mixed64"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_suite_needs_a_gpu_unless_told_otherwise() -> None:
    options = OfflineOptions(suite="ladder")
    assert (options.device, options.dtype, options.repetitions, options.systems) == (
        *("cuda", "bfloat16", 2, "weft,hf_static"),
    )
    with pytest.raises(ConfigError, match="cuda"):
        list(EXPERIMENT.run(options, show_nothing))
    plain = OfflineOptions()
    assert (plain.device, plain.dtype, plain.repetitions) == ("cpu", "float32", 1)


def test_cases_leave_out_suites_that_have_none_of_them() -> None:
    assert [suite.name for suite in chosen_suites("ladder,mixed64", [8])] == ["ladder"]
    assert [case.in_flight for case in chosen_suites("big", [256, 1])[0].cases] == [1, 256]


def test_engine_options_have_types() -> None:
    text = "enforce_eager=true,overlap=None,gpu_memory_utilization=0.5,graph_batch_sizes=1:2,policy=fcfs"
    assert parse_engine_options(text) == {
        "enforce_eager": True,
        "overlap": None,
        "gpu_memory_utilization": 0.5,
        "graph_batch_sizes": (1, 2),
        "policy": "fcfs",
    }
    assert parse_engine_options(None) == {}
    with pytest.raises(ConfigError, match="twice"):
        parse_engine_options("overlap=true,overlap=false")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo=1", "foo"),
        ("dtype=float16", "dtype is not the engine's alone"),
        ("model=x", "model is not the engine's alone"),
        ("enforce_eager=maybe", "enforce_eager must be True or False, got 'maybe'"),
        ("max_num_seqs=4,graph_batch_sizes=1:8", "only max_num_seqs=4 requests"),
        ("graph_batch_sizes=0:8", "graph_batch_sizes must be a positive integer, got 0"),
    ],
)
def test_what_no_engine_takes_is_an_error_before_anything_runs(text: str, message: str) -> None:
    with pytest.raises(WeftError, match=re.escape(message)):
        parse_engine_options(text)


def test_graphs_of_large_batches_need_no_word_about_how_many_run() -> None:
    assert parse_engine_options("graph_batch_sizes=1:64") == {"graph_batch_sizes": (1, 64)}


def test_more_requests_than_the_engine_runs_cannot_decode_at_once() -> None:
    with pytest.raises(ConfigError, match="batch=2 requests do not decode at once in an engine of max_num_seqs=1"):
        StepsOptions(batch="1,2", engine="max_num_seqs=1")


def test_a_plan_needs_a_dtype_by_name() -> None:
    with pytest.raises(ConfigError, match="dtype='auto'"):
        PlanOptions(dtype="auto")
