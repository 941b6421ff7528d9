import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from weft.attention.interface import AttentionSpec
from weft.config import EngineConfig
from weft.errors import ContextLengthError, TokenOutOfRangeError
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.source import open_checkpoint
from weft.models.llama import Llama
from weft.testing.continuation import Continuation
from weft.testing.exactness import SAFE_MARGIN, Verdict
from weft.testing.near_ties import audit_near_ties
from weft.testing.oracle import Oracle
from weft.testing.reference import own_noise
from weft.testing.report import show_table, verdict_line, write_json
from weft.testing.subject import Subject
from weft.testing.tiny import save_tiny_model
from weft.testing.verify import NamedPrompt, Result, verify

PROMPTS = [NamedPrompt(name=f"p{length}", token_ids=tuple(range(3, 3 + length))) for length in (1, 5, 17)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", eos_token_id=[9, 77])


def run(folder: Path, prompts: list[NamedPrompt] = PROMPTS, *, dtype: str = "float32") -> Result:
    config = EngineConfig.of(model=str(folder), dtype=dtype, max_num_seqs=2, seed=5)
    return verify(config, open_checkpoint(str(folder)), prompts, max_new_tokens=12)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Result:
    return run(folder)


def test_a_sound_engine_passes_and_every_prompt_is_judged(exact: Result) -> None:
    assert exact.passed
    assert (exact.num_equal, len(exact.comparisons)) == (3, 3)
    assert [prompt.name for prompt in exact.prompts] == ["p1", "p5", "p17"]
    assert exact.num_positions == sum(comparison.num_tokens for comparison in exact.comparisons)


def test_a_narrow_dtype_is_judged_by_the_audit(folder: Path) -> None:
    result = run(folder, dtype="bfloat16")
    assert result.audit is not None
    assert result.audit.num_positions == result.num_positions
    assert "tier C" in verdict_line(result)


def test_an_audit_that_passes_excuses_no_answer_that_ends_otherwise(exact: Result) -> None:
    logits = [torch.randn(4, 8, generator=torch.Generator().manual_seed(0))]
    audit = audit_near_ties(logits, logits, logits, dtype=torch.bfloat16)
    assert replace(exact, audit=audit).passed
    ends_otherwise = replace(exact.comparisons[0], verdict=Verdict.DIFFERENT)
    assert not replace(exact, audit=audit, comparisons=[ends_otherwise, *exact.comparisons[1:]]).passed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planted_fault_fails_either_tier(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda self, ids, positions, ops: forward(self, ids, positions // 2, ops))
    result = run(folder, dtype=dtype)
    assert not result.passed
    assert verdict_line(result).startswith("FAIL")


def test_an_error_that_huggingface_does_not_make_itself_is_never_excused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = run(folder, dtype="bfloat16").audit
    spec = Llama.attention_spec

    def steeper(model: Llama, layer: int, window: int | None = None) -> AttentionSpec:
        right = spec(model, layer, window)
        return replace(right, scale=right.scale * 1.1)

    monkeypatch.setattr(Llama, "attention_spec", steeper)
    result = run(folder, dtype="bfloat16")
    faulty = result.audit
    assert sound is not None
    assert faulty is not None
    assert sound.passed
    assert not result.passed
    own = [(audit.tolerance, audit.own_flips, audit.own_mean_kl) for audit in (sound, faulty)]
    assert own[0] == own[1], "the measure of noise moved with the engine"


def test_own_noise_is_one_pass_against_token_by_token(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    oracle = Oracle(checkpoint.tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    reference = oracle.generate(PROMPTS[2].token_ids, 12)
    once = oracle.score(reference.prompt_token_ids, reference.token_ids)
    noise = own_noise(oracle, reference)
    assert noise == float((once - reference.logits).abs().max())
    assert 0 < noise < 1e-3
    for shift in (0.5, -0.5):  # the largest difference, whatever its sign
        moved = replace(reference, logits=reference.logits + shift * torch.eye(*reference.logits.shape))
        assert own_noise(oracle, moved) == pytest.approx(0.5, abs=2 * noise)


def test_a_wrong_token_with_a_wide_margin_is_different_and_no_tie(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Subject.run
    margins: list[float] = []

    def slip(
        subject: Subject, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **rest: Any
    ) -> list[Continuation]:
        first, *others = honest(subject, prompts, params, **rest)
        step = int(first.margins.argmin())
        margins.append(float(first.margins[step]))
        second = int(first.logits[step].topk(2).indices[1])
        wrong = (*first.token_ids[:step], second, *first.token_ids[step + 1 :])
        return [replace(first, token_ids=wrong), *others]

    monkeypatch.setattr(Subject, "run", slip)
    result = run(folder)
    assert SAFE_MARGIN < margins[0] < 1, "wide for float32, yet no wider than a logit"
    assert sorted(comparison.verdict.value for comparison in result.comparisons) == ["different", "equal", "equal"]
    assert not result.passed


def test_no_prompts_are_no_pass(exact: Result) -> None:
    assert not Result(prompts=[], comparisons=[], audit=None, description="").passed


def test_a_bad_prompt_is_named_before_any_work(folder: Path) -> None:
    with pytest.raises(TokenOutOfRangeError, match=r"prompts\[1\].*131"):
        run(folder, [PROMPTS[0], NamedPrompt(name="bad", token_ids=(131,))])
    with pytest.raises(ContextLengthError, match=r"prompts\[0\]"):
        run(folder, [NamedPrompt(name="long", token_ids=(1,) * 128)])


def test_the_json_holds_what_the_table_shows(exact: Result, tmp_path: Path) -> None:
    write_json(exact, tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["passed"] is True
    assert [row["prompt"] for row in content["prompts"]] == ["p1", "p5", "p17"]
    assert {row["verdict"] for row in content["prompts"]} == {"equal"}
    assert content["versions"].keys() == {"python", "torch", "transformers"}
    shown = io.StringIO()
    show_table(exact, Console(width=120, file=shown))
    assert all(name in shown.getvalue() for name in ("p1", "p5", "p17", "equal?"))


def test_a_prompt_that_looks_like_markup_is_shown_as_it_is(exact: Result) -> None:
    named = [NamedPrompt(name=f"[red][INST] hi [/INST] {prompt.name}", token_ids=(3,)) for prompt in exact.prompts]
    shown = io.StringIO()
    show_table(replace(exact, prompts=named), Console(width=160, file=shown))
    assert "[red][INST] hi [/INST]" in shown.getvalue()
