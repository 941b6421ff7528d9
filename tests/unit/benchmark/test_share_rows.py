"""The gate on shares: a slow day does not move it, a slower step does, and so does one that is far too good."""

import json
from math import nan
from pathlib import Path
from typing import Any

import pytest

from weft.benchmark.shares import DECODE_TOLERANCE, PREFILL_TOLERANCE, decode_shares, prefill_shares
from weft.testing.snapshots import ShareSnapshot, share_difference

BASELINES = Path(__file__).parents[2] / "perf" / "baselines"


def measured(*, step_ms: float = 1.0, copies: float = 4000.0, batch: int = 8) -> dict[str, Any]:
    """The row of one simulated run of `weft bench steps`."""
    case = f"llama-1b: {batch} requests at a context of 2,048"
    return share_of(decode_shares, "steps", "decode step", case, step_ms, copies)


def prompts(*, prompt_ms: float = 10.0, products: float = 750_000.0, length: int = 2048) -> dict[str, Any]:
    """The row of one simulated run of `weft bench prefill`."""
    case = f"llama-1b: 32 prompts of {length:,} tokens, steps of 2,048"
    return share_of(prefill_shares, "prefill", "a prompt", case, prompt_ms, products)


def share_of(shares: Any, experiment: str, metric: str, case: str, value: float, rate: float) -> dict[str, Any]:
    record = {
        "experiment": experiment,
        "metric": metric,
        "case": case,
        "model": "llama-1b",
        "dtype": "bfloat16",
        "value": value,
        "spread": 0.01,
        "calibration": {"copy_gb_per_s": rate, "gemm_gflop_per_s": rate},
    } | dict.fromkeys(("date", "commit", "dirty", "device", "driver", "python", "torch", "triton", "notes"), "here")
    others = [record | {"value": 9.0, name: "another"} for name in ("experiment", "metric")]
    (share,) = shares([*others, record, *others]).values()
    assert isinstance(share, dict)
    return share


def holds(stored: dict[str, Any], found: dict[str, Any]) -> bool:
    return ShareSnapshot().matches(serialized_data=json.dumps(found), snapshot_data=json.dumps(stored))


def test_a_share_is_bytes_over_time_over_the_rate_of_copies() -> None:
    weights = 16 * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192 + 2) + 2048 * (128_256 + 1)
    cache = 8 * 2048 * 16 * 2 * 512
    assert measured()["value"] == pytest.approx(2 * (weights + cache) / 1e-3 / 4000e9, abs=1e-4)
    assert measured()["tolerance"] == DECODE_TOLERANCE
    assert {"date", "driver", "torch", "triton", "calibration"} <= measured().keys(), "a row names its provenance"


def test_a_slow_day_moves_nothing_and_a_slower_step_does() -> None:
    stored = measured()
    for factor in (0.8, 0.95, 1.1, 1.3):
        assert holds(stored, measured(step_ms=factor, copies=4000 / factor)), "the whole machine is slower or faster"
    for factor in (0.95, 0.99, 1.03, 1.06):
        assert holds(stored, measured(step_ms=factor))
    for factor in (1.08, 1.1, 2.0):
        assert not holds(stored, measured(step_ms=factor))


def test_a_share_of_products_is_operations_over_time_over_their_rate() -> None:
    matrices = 16 * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
    attention = 16 * 4 * 2048 * 2048 * 2048 / 2
    operations = 2 * matrices * 2048 + attention + 2 * 2048 * 128_256
    assert prompts()["value"] == pytest.approx(operations / 10e-3 / 750_000e9, abs=1e-4)
    assert prompts(length=8192)["value"] > 4 * prompts()["value"], "attention grows faster than the prompt"
    assert prompts()["tolerance"] == PREFILL_TOLERANCE


def test_a_slower_prefill_fails_and_a_slow_day_does_not() -> None:
    for factor in (0.8, 1.3):
        assert holds(prompts(), prompts(prompt_ms=10 * factor, products=750_000 / factor))
    for factor in (0.93, 1.08):
        assert holds(prompts(), prompts(prompt_ms=10 * factor))
    for factor in (0.01, 0.9, 1.1, 2.0):
        assert not holds(prompts(), prompts(prompt_ms=10 * factor))
    assert not holds(measured(), prompts())


@pytest.mark.parametrize("factor", [0.9, 0.5, 0.01])
def test_far_too_good_fails_as_well(factor: float) -> None:
    assert not holds(measured(), measured(step_ms=factor))
    assert "better by more than 7 %" in share_difference(measured(), measured(step_ms=factor))


@pytest.mark.parametrize(
    "change",
    [{"tolerance": 0.5}, {"case": "llama-8b: 8 requests at a context of 2,048"}, {"metric": "speed"}, {"value": nan}],
    ids=["a looser tolerance", "another case", "another metric", "no number"],
)
def test_another_row_is_no_match(change: dict[str, Any]) -> None:
    assert not holds(measured(), measured() | change)


def test_where_it_was_measured_may_differ() -> None:
    assert holds(measured(), measured() | {"date": "tomorrow", "commit": "another", "step_ms": 5.0})


def test_every_stored_share_says_where_it_comes_from() -> None:
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in BASELINES.glob("*/test_shares/*.json")]
    assert stored
    for row in stored:
        assert all(row[name] for name in ("date", "commit", "device", "driver", "torch", "triton", "calibration"))
        tolerances = {"share of copy bandwidth": DECODE_TOLERANCE, "share of the GEMM rate": PREFILL_TOLERANCE}
        assert row["tolerance"] == tolerances[row["metric"]]


@pytest.mark.parametrize(
    "fault",
    [
        {"value": 0},
        {"value": -0.5},
        {"value": nan},
        {"value": "0.5"},
        {"tolerance": nan},
        {"tolerance": 1.0},
        {"tolerance": None},
    ],
    ids=str,
)
def test_a_row_that_could_hold_anything_holds_nothing(fault: dict[str, Any]) -> None:
    """A run that measured nothing, beside a baseline that measured nothing, is no gate."""
    row = measured()
    for stored, found in ((row | fault, row), (row, row | fault), (row | fault, row | fault)):
        assert "hold nothing" in share_difference(stored, found)
        assert not holds(stored, found)
