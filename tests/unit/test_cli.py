"""The command line: text or JSON on stdout, one error with its hint on stderr, and an exit status that tells."""

import io
import json
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_llm import save_text_model
from weft import LLM, SamplingParams, __version__
from weft.chat_command import WITHOUT
from weft.cli import _parser, exit_status, main
from weft.command_arguments import sampling_params
from weft.inference.sampler import GumbelSampler
from weft.tokenizer.hub import HubTokenizer

COMMANDS = ["generate", "chat", "bench"]
# What to type for each field of SamplingParams, and what it is then.
FIELDS: dict[str, tuple[list[str], Any]] = {
    "n": (["--n", "3"], 3),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "-1"], -1),
    "min_p": (["--min-p", "0.1"], 0.1),
    "seed": (["--seed", "7"], 7),
    "max_tokens": (["--max-tokens", "9"], 9),
    "min_tokens": (["--min-tokens", "2"], 2),
    "stop": (["--stop", "a", "--stop", "b,c"], ("a", "b,c")),
    "include_stop_str_in_output": (["--include-stop"], True),
    "stop_token_ids": (["--stop-token-ids", "5,17"], (5, 17)),
    "ignore_eos": (["--ignore-eos"], True),
    "presence_penalty": (["--presence-penalty", "-1"], -1.0),
    "frequency_penalty": (["--frequency-penalty", "0.5"], 0.5),
    "repetition_penalty": (["--repetition-penalty", "1.2"], 1.2),
    "logit_bias": (["--logit-bias", "17:2.5,5:-100"], ((5, -100.0), (17, 2.5))),
    "bad_words": (["--bad-words", "a", "--bad-words", "b c"], ("a", "b c")),
    "allowed_token_ids": (["--allowed-token-ids", "5"], (5,)),
    "logprobs": (["--logprobs", "-1"], -1),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "detokenize": (["--no-detokenize"], False),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "spaces_between_special_tokens": (["--no-spaces-between-special-tokens"], False),
}


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


@pytest.mark.parametrize("where", ["README.md", *COMMANDS])
def test_the_examples_can_be_typed(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    if where == "README.md":
        shown = (Path(__file__).parents[2] / where).read_text(encoding="utf-8")
    else:
        with pytest.raises(SystemExit):
            main([where, "--help"])
        shown = capsys.readouterr().out.partition("example")[2].replace("\n", " ").replace("weft", "\nweft")
    commands = re.findall(r"^(?:\$ |.* \| )?(?:uv run )?weft ((?:generate|chat|bench) .*)$", shown, re.MULTILINE)
    assert commands
    for command in commands:
        parsed = _parser().parse_args(shlex.split(command.rstrip("; "), comments=True))
        if hasattr(parsed, "max_tokens"):
            sampling_params(parsed, SamplingParams())


@pytest.mark.parametrize(
    ("command", "without"), [("generate", set()), ("chat", set(WITHOUT))], ids=["generate", "chat"]
)
def test_every_sampling_parameter_has_an_argument_or_a_reason_why_not(command: str, without: set[str]) -> None:
    names = {item.name for item in fields(SamplingParams)}
    assert names == FIELDS.keys()
    prompts = ["x"] if command == "generate" else []
    base = SamplingParams(temperature=0.25, max_tokens=33, min_p=0.5, bad_words=["z"])
    unasked = _parser().parse_args([command, *prompts])
    assert without == names - vars(unasked).keys()
    for name in names - without:
        arguments, value = FIELDS[name]
        asked = vars(_parser().parse_args([command, *prompts, *arguments]))
        only = Namespace(**(dict.fromkeys(names) | {name: asked[name]}))
        assert sampling_params(only, base) == replace(base, **{name: value})
    nothing = Namespace(**dict.fromkeys(names))
    for kept in (base, SamplingParams(stop="z", min_tokens=3, ignore_eos=True)):
        assert sampling_params(nothing, kept) == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stop-token-ids", "5;6"], "argument --stop-token-ids: '5;6' is no list of token ids, such as 5,17"),
        (["--allowed-token-ids", ""], "argument --allowed-token-ids: '' is no list of token ids, such as 5,17"),
        (["--logit-bias", "5"], "argument --logit-bias: '5' is no list of token ids and biases, such as 5:-100,17:2.5"),
        (["--logit-bias", "a:1"], "argument --logit-bias: 'a:1' is no list of token ids and biases"),
        (["--top-k", "2.5"], "argument --top-k: invalid int value: '2.5'"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_a_value_that_cannot_be_read_is_named_with_its_argument(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "row", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


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


def test_what_a_prompt_is_and_tokens_alone_are_json_too(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "row", "--prompt-logprobs", "1", "--no-detokenize", "--json") == 0
    row = json.loads(capsys.readouterr().out)
    first, *others = row["prompt_logprobs"]
    assert first is None
    assert len(others) == len(row["prompt_token_ids"]) - 1
    assert row["outputs"][0]["text"] is None
    assert len(row["outputs"][0]["token_ids"]) == 5


def test_tokens_and_words_are_asked_for_by_id_and_by_name(
    model: str, expected: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    def token_ids(*arguments: str) -> list[int]:
        assert generate(model, "row by row", *arguments, "--json") == 0
        (answer,) = json.loads(capsys.readouterr().out)["outputs"]
        ids: list[int] = answer["token_ids"]
        return ids

    plain = token_ids()
    assert token_ids("--stop-token-ids", f"279,{plain[2]}") == plain[: plain.index(plain[2]) + 1]
    assert token_ids("--logit-bias", f"7:100,{plain[0]}:-100") == [7] * 5
    assert set(token_ids("--allowed-token-ids", "8,9")) <= {8, 9}
    assert generate(model, "row", "--allowed-token-ids", "1") == 0
    assert capsys.readouterr().out == "row\n"
    assert generate(model, "row", "--allowed-token-ids", "1", "--no-skip-special-tokens") == 0
    assert capsys.readouterr().out == "row" + "</s>" * 5 + "\n"
    letters = ",".join(str(token) for token in HubTokenizer(Path(model)).encode("xz"))
    for word, other in ("xz", "zx"):
        assert generate(model, "row", "--allowed-token-ids", letters, "--bad-words", word) == 0
        assert capsys.readouterr().out == f"row{other * 5}\n"


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
        (["row", "--prompt-logprobs", "0"], "--prompt-logprobs 0 is shown in JSON alone", "add --json"),
        (["row", "--no-detokenize"], "--no-detokenize leaves no text", "add --json"),
        (["row", "--logit-bias", "5:101"], "logit_bias[5] must be in [-100, 100], got 101", ""),
        (["row", "--logit-bias", "5:1,5:2"], "logit_bias holds token 5 twice", "one number for each token"),
        (["row", "--stop-token-ids", "-5"], "stop_token_ids must hold token ids, got -5", ""),
        (["row", "--allowed-token-ids", "280"], "prompts[0]: allowed_token_ids holds 280, outside the vocabulary", ""),
        (["row", "--bad-words", ""], "bad_words must hold words or lists of token ids, got ''", ""),
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
        "prompt_logprobs",
        "detokenize",
        "logit_bias",
        "biased twice",
        "stop_token_ids",
        "allowed_token_ids",
        "bad_words",
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


def test_an_answer_that_breaks_off_says_why_and_exits_1(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GumbelSampler, "__call__", lambda self, logits, rows: logits.argmax(dim=-1) * 0 - 1)
    for arguments in ([], ["--stream"], ["--json"], ["--json", "--stream"]):
        assert generate(model, "row", *arguments) == 1
        out, err = capsys.readouterr()
        assert "weft: prompts[0]: the answer breaks off: the logits hold NaN or infinity\n" in err
        if "--json" in arguments:
            (answer,) = json.loads(out)["outputs"]
            assert (answer["finish_reason"], answer["error"]) == ("error", "the logits hold NaN or infinity")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert main(["chat", "--model", model, "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["error"] for line in out.splitlines()] == ["the logits hold NaN or infinity"] * 2
    assert err.count("weft: the answer breaks off: the logits hold NaN or infinity\n") == 2


def test_bytes_that_are_no_text_are_an_error_not_a_traceback(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "row \udcff") == 2  # how Python hands over an argument of b"row \xff"
    assert "weft: prompts[0]: character 4" in capsys.readouterr().err


def test_an_interrupt_exits_130(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupted)
    assert generate(model, "row") == 130


@pytest.mark.parametrize(("fails", "status"), [(False, 0), (True, 2)])
def test_a_program_without_standard_output_ends_as_any_other(
    fails: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed before it begins, it is None."""

    def run() -> int:
        if fails:
            raise OSError("the disk is full")
        return 0

    monkeypatch.setattr("sys.stdout", None)
    assert exit_status("weft", run) == status
