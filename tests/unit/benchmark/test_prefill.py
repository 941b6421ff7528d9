"""Prompts alone: each is computed once and gives one token, and its time is that of the steps it took part in."""

from typing import Any

import pytest

from tests.unit.benchmark.test_experiments import run
from tests.unit.benchmark.test_steps import tiny_engine
from weft.benchmark.experiments.prefill import PrefillOptions
from weft.benchmark.prefill_steps import PromptsAlone, prompt_flops
from weft.benchmark.shapes import SHAPES
from weft.errors import ConfigError


@pytest.mark.parametrize(("length", "steps"), [(40, 3), (8, 0.5)])
def test_a_prompt_takes_its_part_of_the_steps(length: int, steps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second a step: what is shared is shared out, what comes in chunks is summed; the warm-up does not count."""
    engine = tiny_engine(max_num_batched_tokens=16, max_num_seqs=2)
    step, calls = engine.step, 0

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return step()

    monkeypatch.setattr(engine, "step", counted)
    monkeypatch.setattr("weft.benchmark.prefill_steps.perf_counter", lambda: float(calls))
    advanced: list[int] = []
    alone = PromptsAlone(engine, length=length, prompts=4, repetitions=2, seed=0)
    seconds = alone.measure(lambda: advanced.append(1))
    assert len(seconds) == len(advanced) == 2
    # Four prompts of 40 are 160 tokens, ten steps of 16 and not twelve: the next begins in a last chunk.
    assert seconds == pytest.approx([length * 4 / 16 / 4] * 2, rel=0.2)
    assert seconds[0] == pytest.approx(steps, rel=0.2)
    assert not engine.has_unfinished_requests()


def test_a_prompt_without_a_token_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: step() and [])
    with pytest.raises(AssertionError, match="2 prompts gave 0 tokens"):
        PromptsAlone(engine, length=4, prompts=2, repetitions=1, seed=0).measure(lambda: None)


def test_no_two_prompts_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache might find would not be computed."""
    engine = tiny_engine()
    seen: list[tuple[int, ...]] = []
    add = engine.add_request
    monkeypatch.setattr(
        engine, "add_request", lambda name, tokens, *rest: seen.append(tuple(tokens)) or add(name, tokens, *rest)
    )
    PromptsAlone(engine, length=8, prompts=3, repetitions=2, seed=0).measure(lambda: None)
    assert len(set(seen)) == len(seen) == 2 + 2 * 3


def test_operations_grow_with_the_prompt_and_a_little_faster() -> None:
    short, long = (prompt_flops(SHAPES["llama-8b"], length) for length in (1024, 8192))
    assert 8 < long / short < 12
    assert prompt_flops(SHAPES["llama-8b"], 1024) == pytest.approx(2 * 7e9 * 1024, rel=0.05), "8b less both embeddings"


def test_rows_of_each_length() -> None:
    rows = run("prefill")
    assert [row.case for row in rows if row.metric == "a prompt"] == [
        "llama-tiny: 13 prompts of 6 tokens, steps of 16",
        "llama-tiny: 2 prompts of 40 tokens, steps of 16",
    ]
    for place in (0, 3):
        prompt, speed, work = rows[place : place + 3]
        assert prompt.repetitions == speed.repetitions == 2
        assert work.unit == "GFLOP"
        assert speed.value > 0


@pytest.mark.parametrize("options", [{"prompts": "0"}, {"budget": 0}, {"tokens": 0}, {"engine": "overlaps=false"}])
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrefillOptions(**options)
