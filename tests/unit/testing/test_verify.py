import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from weft.config import EngineConfig
from weft.errors import ContextLengthError, TokenOutOfRangeError
from weft.models.checkpoint.source import open_checkpoint
from weft.models.llama import Llama
from weft.testing.report import show_table, verdict_line, write_json
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planted_fault_fails_either_tier(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda self, ids, positions, ops: forward(self, ids, positions // 2, ops))
    result = run(folder, dtype=dtype)
    assert not result.passed
    assert verdict_line(result).startswith("FAIL")


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
