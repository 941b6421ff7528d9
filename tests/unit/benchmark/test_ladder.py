"""Every rung is the one below and one thing more, and a rung that says something else has no factor."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from weft.benchmark.experiments.ladder import EXPERIMENT, LadderOptions
from weft.benchmark.ladder_run import Climb
from weft.benchmark.measure import Outcome
from weft.benchmark.progress import show_nothing
from weft.benchmark.row import Row
from weft.benchmark.rungs import RUNGS, Rung
from weft.benchmark.served_model import open_model
from weft.benchmark.suites import Case
from weft.benchmark.systems.weft import WeftSystem
from weft.benchmark.workload import Workload
from weft.config import EngineConfig
from weft.errors import ConfigError

CASES = (
    Case(in_flight=4, requests=12, prompts="4:9", outputs="2:6"),
    Case(in_flight=1, requests=3, prompts="4", outputs="3"),
)

BROKEN = Rung(name="broken", options={"attention_backend": "nobody"})


def climb(rungs: tuple[Rung, ...], **options: Any) -> list[Row]:
    model = open_model(model="llama-tiny", shape="llama-tiny", dtype="float32", device="cpu", seed=0)
    given = {"model": model, "cases": CASES, "seed": 0, "repetitions": 2, "slow_requests": 5, "engine": {}}
    return list(Climb(**(given | options)).rows(rungs, show_nothing))


def metrics(rows: list[Row], rung: str, case: Case) -> dict[str, Row]:
    return {row.metric: row for row in rows if row.system == f"weft {rung}" and row.case == str(case)}


def test_each_rung_changes_one_thing_of_the_one_below() -> None:
    """As told in the issue: serial, static, continuous, paged, Triton, graphs, fused, overlap."""
    parts = [
        EngineConfig.of(model="-", **({"max_num_seqs": 64, "max_num_batched_tokens": 2048} | dict(rung.options)))
        for rung in RUNGS
    ]
    seen = [
        (
            config.scheduler.max_num_seqs,
            config.scheduler.policy,
            config.cache.attention_backend,
            config.execution.enforce_eager,
            config.execution.operations,
            config.execution.overlap,
        )
        for config in parts
    ]
    assert seen == [
        (1, "fcfs", "contiguous", True, "plain", False),
        (64, "static", "contiguous", True, "plain", False),
        (64, "fcfs", "contiguous", True, "plain", False),
        (64, "fcfs", "paged_gather", True, "plain", False),
        (64, "fcfs", "paged_triton", True, "plain", False),
        (64, "fcfs", "paged_triton", False, "plain", False),
        (64, "fcfs", "paged_triton", False, "fused", False),
        (64, "fcfs", "paged_triton", False, "fused", True),
    ]
    # Only from serial to static do two things change: more than one at a time needs a policy.
    changes = [sum(a != b for a, b in zip(one, other, strict=True)) for one, other in pairwise(seen)]
    assert changes == [2, 1, 1, 1, 1, 1, 1]


def test_the_rungs_of_a_cpu_say_the_same_and_stand_over_each_other() -> None:
    rows = climb(RUNGS[:4])
    for case in CASES:
        below = metrics(rows, RUNGS[0].name, case)["output tokens"].value
        for rung in RUNGS[1:4]:
            mine = metrics(rows, rung.name, case)
            assert mine["requests equal to the rung below"].verdict == "met"
            factor = mine["tokens/s over the rung below"].value
            assert factor == pytest.approx(mine["output tokens"].value / below)
            below = mine["output tokens"].value


def test_slow_rungs_answer_fewer_and_say_so() -> None:
    rows = climb((RUNGS[2], Rung(name="quick", options={"attention_backend": "paged_gather"})))
    slow, quick = (metrics(rows, name, CASES[0])["output tokens"] for name in (RUNGS[2].name, "quick"))
    assert "the first 5 of 12 requests" in slow.notes
    assert "first" not in quick.notes
    assert (slow.repetitions, quick.repetitions) == (1, 2)
    assert metrics(rows, "quick", CASES[0])["requests equal to the rung below"].unit == "of 5"
    assert (
        "first" not in metrics(climb((RUNGS[2],), slow_requests=None), RUNGS[2].name, CASES[0])["output tokens"].notes
    )


def test_a_rung_that_cannot_run_says_why_and_the_next_stands_over_the_last_that_did() -> None:
    rows = climb((RUNGS[2], BROKEN, RUNGS[3]))
    assert not any(row.failed for row in rows), "it was not begun"
    for case in CASES:
        assert "nobody" in metrics(rows, "broken", case)["not measured"].notes
        assert f"over weft {RUNGS[2].name}" in metrics(rows, RUNGS[3].name, case)["tokens/s over the rung below"].notes


def test_rungs_of_which_none_can_run_are_an_error_before_any_is_tried() -> None:
    model = open_model(model="llama-tiny", shape="llama-tiny", dtype="float32", device="cpu", seed=0)
    climbing = Climb(model=model, cases=CASES, seed=0, repetitions=1, slow_requests=None, engine={"policy": "nobody"})
    with pytest.raises(ConfigError, match="unknown policy='nobody'"):
        climbing.rows(RUNGS[:2], show_nothing)


def test_a_rung_that_fails_half_way_keeps_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = WeftSystem.run

    def hungry(self: Any, workload: Workload, *arguments: Any) -> Outcome:
        if workload.in_flight == 1 and self.engine.geometry.shareable:
            raise torch.OutOfMemoryError("too much")
        return whole(self, workload, *arguments)

    monkeypatch.setattr(WeftSystem, "run", hungry)
    rows = climb((RUNGS[2], RUNGS[3]))
    assert "not measured" not in metrics(rows, RUNGS[3].name, CASES[0])
    assert "output tokens" in metrics(rows, RUNGS[3].name, CASES[0])
    unmeasured = metrics(rows, RUNGS[3].name, CASES[1])["not measured"]
    assert "too much" in unmeasured.notes
    assert [row for row in rows if row.failed] == [unmeasured]


def test_a_rung_that_says_something_else_has_no_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = WeftSystem.run

    def wrong(self: Any, *arguments: Any) -> Outcome:
        outcome = whole(self, *arguments)
        if self.engine.geometry.shareable:
            first = outcome.answers[0]
            object.__setattr__(first, "token_ids", (first.token_ids[0] ^ 1, *first.token_ids[1:]))
        return outcome

    monkeypatch.setattr(WeftSystem, "run", wrong)
    mine = metrics(climb(RUNGS[2:4]), RUNGS[3].name, CASES[0])
    assert mine["requests equal to the rung below"].verdict == "missed"
    assert "tokens/s over the rung below" not in mine


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rungs": "9"}, "names rung 9"),
        ({"rungs": "0"}, "positive"),
        ({"rungs": ""}, "no list of numbers"),
        ({"in_flight": "3"}, "has 3 in flight"),
        ({"slow_requests": -1}, "slow_requests"),
        ({"repetitions": 0}, "repetitions"),
        ({"engine": "overlap"}, "no name=value"),
        ({"shape": "llama-9b", "device": "cpu"}, "unknown shape"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(EXPERIMENT.run(LadderOptions(**options), show_nothing))
