"""The command line: text or JSON on stdout, one error with its hint on stderr, and an exit status that tells."""

import io
import json
import subprocess
import sys

import pytest

from tests.unit.test_llm import save_text_model
from weft import LLM, SamplingParams, __version__
from weft.cli import main

COMMANDS = ["generate", "chat", "bench"]


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
    for arguments, status in (
        (["generate", "--help"], 0),
        (["chat", "--help"], 0),
        (["generate", "a", "--max-tokens", "x"], 2),
    ):
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


def test_a_stream_prints_what_the_whole_prints(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "row by row", "warp") == 0
    whole = capsys.readouterr().out
    assert generate(model, "row by row", "warp", "--stream") == 0
    assert capsys.readouterr().out == whole
    assert generate(model, "warp", "--stream", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert whole.endswith("warp" + "".join(row["outputs"][0]["text"] for row in rows) + "\n")
    assert [row["finished"] for row in rows] == [False] * (len(rows) - 1) + [True]


def test_a_stop_text_and_several_answers_are_asked_for_by_name(
    model: str, expected: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    text = expected[0] or ""
    stop = text[len(text) // 2 :][:2]
    assert generate(model, "row by row", "--stop", stop, "--stop", "never said", "--json") == 0
    (answer,) = json.loads(capsys.readouterr().out)["outputs"]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (text[: text.index(stop)], "stop", stop)
    assert generate(model, "row by row", "--stop", stop, "--include-stop") == 0
    assert capsys.readouterr().out == f"row by row{text[: text.index(stop)]}{stop}\n"
    assert generate(model, "row", "--n", "3", "--temperature", "1", "--seed", "3") == 0
    several = capsys.readouterr().out
    for seed in (3, 4, 5):
        assert generate(model, "row", "--temperature", "1", "--seed", str(seed)) == 0
        assert capsys.readouterr().out in several


def test_logprobs_are_json_too(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "row", "--logprobs", "2", "--json") == 0
    (answer,) = json.loads(capsys.readouterr().out)["outputs"]
    for token, place in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert place[str(token)].keys() == {"logprob", "rank", "decoded_token"}
        assert len(place) == 2  # the most probable token is the one that greedy took
    assert answer["cumulative_logprob"] < 0


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
        (["row", "--top-k", "-2"], "top_k must be an integer from -1 on, got -2", "0 or -1 is all"),
        (["row", "--n", "2"], "n=2 answers at temperature=0 are all the same", "a temperature above 0"),
        (["row", "--n", "2", "--temperature", "1", "--stream"], "--stream shows one answer", "leave out one"),
        (["row", "--logprobs", "2"], "--logprobs 2 is shown in JSON alone", "add --json"),
        (["row", "--max-tokens", "2", "--min-tokens", "3"], "min_tokens=3 is more than max_tokens=2", ""),
        (["row", "--dtype", "fp8"], "unknown dtype='fp8'", "one of auto, float32"),
        (["row", "--max-model-len", "65"], "max_model_len=65 exceeds the 64 positions", "never trained"),
        (["", "--max-tokens", "5"], "prompts[0]: the prompt has no tokens", "BOS"),
    ],
    ids=[
        "model",
        "max_tokens",
        "top_k",
        "n greedy",
        "streamed",
        "logprobs",
        "min_tokens",
        "dtype",
        "max_model_len",
        "prompt",
    ],
)
def test_an_error_is_said_once_with_its_hint_and_exits_2(
    arguments: list[str], message: str, hint: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", model, "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (said,) = [line for line in err.splitlines() if line.startswith("weft: ")]
    assert said.startswith(f"weft: {message}")
    assert not hint or any(line.startswith("hint: ") and hint in line for line in err.splitlines())
    assert "Traceback" not in err


def test_bytes_that_are_no_text_are_an_error_not_a_traceback(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "row \udcff") == 2  # how Python hands over an argument of b"row \xff"
    assert "weft: prompts[0]: character 4" in capsys.readouterr().err


def test_an_interrupt_exits_130(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupted)
    assert generate(model, "row") == 130
