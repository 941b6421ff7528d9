"""`weft verify`: the example of the docs is judged; what is broken, and what cannot be done, shows in the status."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.made_tokenizers import byte_level, save
from weft.cli import main
from weft.testing.tiny import save_tiny_model
from weft.tokenizer.hub import HubTokenizer

PAGE = Path(__file__).parents[2] / "docs" / "verify.md"
EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
HOLDING = {
    "tokens equal huggingface",
    "logits equal huggingface",
    "finish reasons equal huggingface",
    "prompts at the edges of blocks equal huggingface",
    "an answer ends at its own length",
    "stop token ids end an answer",
    "batch mates change nothing",
    "a prompt again says the same",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(byte_level(), tmp_path_factory.mktemp("verified"), added=())
    fields = {"vocab_size": len(HubTokenizer(folder).inner), "num_hidden_layers": 1, "eos_token_id": [3, 57, 90]}
    return save_tiny_model(folder, "llama", max_position_embeddings=400, **fields)


@pytest.fixture
def verify(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    (tmp_path / "prompts.txt").write_text("over\nrow by row\nthe weft runs across the warp\n")

    def call(code: str, *arguments: str, model: Path = model) -> tuple[int, str, str]:
        (tmp_path / "my_engine.py").write_text(code)
        own = ["--engine", str(tmp_path / "my_engine.py"), "--prompts", str(tmp_path / "prompts.txt")]
        status = main(["verify", str(model), *own, "--device", "cpu", "--max-new-tokens", "4", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_the_engine_of_the_docs_is_judged_and_holds(verify: Any) -> None:
    status, out, _ = verify(EXAMPLE, "--dtype", "float32", "--json")
    report = json.loads(out)
    assert {row["law"] for row in report["laws"] if row["outcome"] == "holds"} == HOLDING
    reasons = {row["law"]: row["words"] for row in report["laws"] if row["outcome"] == "not judged"}
    assert reasons["a seed reproduces and another differs"] == "no seeds: it samples nothing"
    assert (status, report["passed"], report["description"]) == (0, True, "greedy loop, no cache")
    assert report["versions"].keys() >= {"torch", "transformers"}


def test_an_engine_that_breaks_a_law_fails_and_the_table_says_where(verify: Any) -> None:
    fault = EXAMPLE.replace("int(rows[-1].argmax())", "int(rows[-1].argmax()) ^ (len(tokens) > 200)")
    assert fault != EXAMPLE
    status, out, _ = verify(fault, "--dtype", "float32")
    assert status == 1
    assert "FAIL: 7 holds, 1 broken, 3 not judged" in out
    assert re.search(r"prompts at the edges of blocks.*broken", out)


def test_an_engine_of_which_nothing_can_be_judged_does_not_pass(verify: Any) -> None:
    mute = EXAMPLE.replace(
        "    lacks = {\n", '    lacks = {\n        "dtype": "unknown",\n        "finish_reasons": "none",\n'
    )
    mute = mute.replace("token_ids=said, finish_reason=reason", 'text="?"').replace(
        "\n    lacks = {", '\n    lacks = {"token_ids": "none",'
    )
    status, out, _ = verify(mute)
    assert (status, "0 holds, 0 broken" in out) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vlm"], "did you mean 'vllm'?"),
        (["--dtype", "float128"], "float128"),
        (["--max-new-tokens", "3"], "--max-new-tokens must be at least 4, got 3"),
        (["--max-new-tokens", "400"], "exceed the model's 400 positions"),
        (["--prompts", "absent.txt"], "absent.txt"),
    ],
)
def test_what_cannot_be_done_says_so_before_any_work(verify: Any, arguments: list[str], message: str) -> None:
    status, out, err = verify(EXAMPLE, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_help_names_every_engine_and_imports_no_torch() -> None:
    call = "try: main(['verify', '--help'])\nfinally: assert 'torch' not in sys.modules"
    code = f"import sys\nfrom weft.cli import main\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hf, hf-cb, openai:URL, vllm, weft" in " ".join(done.stdout.split())


def test_an_engine_of_anybodys_is_judged_on_a_model_that_weft_has_not(
    verify: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = len(HubTokenizer(model).inner)
    fields = {"vocab_size": size, "num_hidden_layers": 1, "max_position_embeddings": 400, "tie_word_embeddings": False}
    folder = save(byte_level(), tmp_path / "olmo2", added=())
    save_tiny_model(folder, "olmo2", eos_token_id=[3, 57, 90], **fields)
    status, out, _ = verify(EXAMPLE, "--dtype", "float32", model=folder)
    assert (status, "PASS: 8 holds, 0 broken" in out) == (0, True)
    assert main(["verify", str(folder)]) == 2
    assert "unknown model_type='olmo2'" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_a_model_without_a_tokenizer_says_what_can_be_done_without_one(
    verify: Any, model: Path, tmp_path: Path, content: str | None
) -> None:
    folder = shutil.copytree(model, tmp_path / "mute")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    status, out, err = verify(EXAMPLE, model=folder)
    assert (status, out) == (2, "")
    assert "has no tokenizer that can be loaded: " in err
    assert "hint: prompts are texts here; run_engine_conformance takes token ids" in err


def test_a_device_that_is_not_there_is_refused_before_a_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "./there-is-no-such-folder", "--device", "cuda:99"]) == 2
    assert "device='cuda:99' but torch sees" in capsys.readouterr().err
