"""The command line: text or JSON on stdout, one error with its hint on stderr, and an exit status that tells."""

import io
import json
import subprocess
import sys

import pytest

from tests.unit.test_llm import save_text_model
from weft import LLM, SamplingParams, __version__
from weft.cli import main

COMMANDS = ["generate", "bench"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_text_model(tmp_path_factory.mktemp("cli"), bos=False))


@pytest.fixture(scope="module")
def expected(model: str) -> list[str | None]:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    return [output.outputs[0].text for output in LLM(model).generate(["row by row", "warp"], params, use_tqdm=False)]


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_answers_zero(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: weft")
    assert err == ""


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"weft {__version__}\n")


def test_help_and_bad_arguments_wait_for_no_torch() -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); import weft.cli as c; c.main()"
    for arguments, status in ((["generate", "--help"], 0), (["generate", "a", "--max-tokens", "x"], 2)):
        run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert (run.returncode, run.stdout.splitlines()[-1]) == (status, "False")


@pytest.mark.parametrize("arguments", [[], ["genrate"], ["generate"], ["generate", "a", "--seeds", "1"]], ids=" ".join)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: weft" in capsys.readouterr().err


def generate(model: str, *arguments: str) -> int:
    return main(["generate", *arguments, "--model", model, "--max-tokens", "5", "--ignore-eos", "--device", "cpu"])


def test_generate_prints_each_prompt_with_its_text(
    model: str, expected: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, "row by row", "warp") == 0
    assert capsys.readouterr().out == f"row by row{expected[0]}\nwarp{expected[1]}\n"


def test_generate_json_is_one_object_a_line(
    model: str, expected: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, "row by row", "warp", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["row by row", "warp"]
    assert [row["outputs"][0]["text"] for row in rows] == expected
    assert all(row["outputs"][0]["finish_reason"] == "length" and row["finished"] for row in rows)


def test_a_dash_reads_the_prompt_from_standard_input(
    model: str, expected: list[str | None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("row by row"))
    assert generate(model, "-", "warp") == 0
    assert capsys.readouterr().out == f"row by row{expected[0]}\nwarp{expected[1]}\n"


def test_a_seed_repeats_a_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("3", "3", "4"):
        assert generate(model, "row", "--temperature", "1", "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["row", "--model", "nobody/nothing"], "model='nobody/nothing' is no alias", "aliases: smollm2-135m"),
        (["row", "--max-tokens", "0"], "max_tokens must be an integer from 1 on", "until the context is full"),
        (["row", "--dtype", "fp8"], "unknown dtype='fp8'", "one of auto, float32"),
        (["row", "--max-model-len", "65"], "max_model_len=65 exceeds the 64 positions", "never trained"),
        (["", "--max-tokens", "5"], "prompts[0]: the prompt has no tokens", "BOS"),
    ],
    ids=["model", "max_tokens", "dtype", "max_model_len", "prompt"],
)
def test_an_error_is_said_once_with_its_hint_and_exits_2(
    arguments: list[str], message: str, hint: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", model, "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (said,) = [line for line in err.splitlines() if line.startswith("weft: ")]
    assert said.startswith(f"weft: {message}")
    assert any(line.startswith("hint: ") and hint in line for line in err.splitlines())
    assert "Traceback" not in err


def test_bytes_that_are_no_text_are_an_error_not_a_traceback(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "row \udcff") == 2  # how Python hands over an argument of b"row \xff"
    assert "weft: prompts[0]: character 4" in capsys.readouterr().err


def test_an_interrupt_exits_130(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupted)
    assert generate(model, "row") == 130
