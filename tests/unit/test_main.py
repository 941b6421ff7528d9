import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

import main
from weft.errors import ConfigError, RequestError
from weft.testing.remote.events import Stamp
from weft.testing.remote.interface import Job


def prompts_of(tmp_path: Path, content: str) -> list[str]:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content.encode())
    return list(main.read_prompts(file).values())


def test_a_prompt_file_holds_a_prompt_a_line_and_json_strings_are_decoded(tmp_path: Path) -> None:
    content = 'plain\n\n   \n"two\\nlines \\u00e9"\n"only begins with a quote\n  kept spaces  \n{"not": "a string"}\n'
    assert prompts_of(tmp_path, content) == [
        "plain",
        "two\nlines é",
        '"only begins with a quote',
        "  kept spaces  ",
        '{"not": "a string"}',
    ]


def test_a_byte_order_mark_belongs_to_no_prompt(tmp_path: Path) -> None:
    assert prompts_of(tmp_path, '\ufeff"one"\ntwo') == ["one", "two"]


def test_equal_lines_stay_two_prompts(tmp_path: Path) -> None:
    assert prompts_of(tmp_path, "same\nsame\n") == ["same", "same"]


def test_lines_end_at_newlines_only_and_windows_endings_are_stripped(tmp_path: Path) -> None:
    assert prompts_of(tmp_path, "one\u2028still one\r\ntwo\r\n") == ["one\u2028still one", "two"]


@pytest.mark.parametrize("content", ["", "\n\n", "   \n"])
def test_a_file_without_prompts_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match="holds no prompt") as caught:
        prompts_of(tmp_path, content)
    assert "a prompt a line" in str(caught.value.hint)


def test_an_empty_json_string_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="line 2"):
        prompts_of(tmp_path, 'fine\n""\n')


@pytest.mark.parametrize(
    ("name", "reason"),
    [("absent.txt", "No such file"), (".", "Is a directory"), ("file/in", "Not a directory"), ("binary", "utf-8")],
)
def test_what_is_no_text_is_an_error_that_says_what_would_be(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=f"^--prompts .*{reason}") as caught:
        main.read_prompts(tmp_path / name)
    assert "a prompt a line" in str(caught.value.hint)


@pytest.mark.parametrize("elsewhere", [[], ["--modal"]])
def test_rows_that_could_not_be_kept_are_not_measured(
    elsewhere: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkout that nobody may write to: rows would come back from another machine and be lost here."""

    def refused(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("weft.benchmark.collection.collect", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr("weft.testing.remote.modal_runner.ModalRunner", Elsewhere)
    monkeypatch.setattr(Path, "open", refused)
    monkeypatch.setattr(sys, "argv", ["main.py", "--collect", "plan", *elsewhere])
    assert main.main() == 2
    assert "cannot be written: [Errno 13] Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "status", "told"),
    [
        (OSError(28, "No space left on device"), 2, "main.py: [Errno 28] No space left on device\n"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),  # as of `main.py | head`
    ],
    ids=["a full disk", "a reader that has left"],
)
def test_what_fails_at_the_end_is_no_crash(
    failure: OSError, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that has filled up since the start; what was found is on the screen by then."""

    def fails(_: object) -> int:
        raise failure

    monkeypatch.setattr(main, "_verify", fails)
    monkeypatch.setattr(sys, "argv", ["main.py"])
    assert main.main() == status
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modal=V100"], "no GPU is named 'V100'"),
        (["--modal", "--json", "/nowhere/out.json"], "/nowhere"),
        (["--modal", "--prompts", "absent.txt"], "absent.txt"),
        (["--modal", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--modal", "--dtype", "float128"], "float128"),
        (["--collect"], "--collect names no experiment\nhint: one of continuous, "),
        (["--collect", "kernel"], "did you mean 'kernels'? It is one of continuous, "),
        (["--collect", "plan", "--modal=V100"], "no GPU is named 'V100'"),
        (["--collect", "plan", "--json", "/nowhere/out.jsonl"], "/nowhere"),
        (["--dtype", "float128"], "float128"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--model", "./nowhere"], "nowhere"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--json", "/nowhere/out.json"], "/nowhere"),
        (["--json", "/"], "no file"),
    ],
)
def test_what_cannot_be_done_says_so_and_exits_non_zero(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
    assert main.main() == 2
    assert message in capsys.readouterr().err


class Elsewhere:
    """A runner in place of Modal's: says what it was asked and that it ended well, with a verdict if one was wanted."""

    asked: ClassVar[list[Job]] = []
    elsewhere = True

    def __init__(self, root: Path, gpu: str, *, may_fetch: bool) -> None:
        self.description = f"{root.name} on {gpu}, fetching {may_fetch}"

    def open(self) -> None: ...

    def close(self) -> None: ...

    def run(self, job: Job) -> Iterator[str]:
        self.asked.append(job)
        stamp = Stamp("A")
        yield stamp("begin", environment={})
        files = [part.removeprefix("--json=") for part in job.program if part.startswith("--json=")]
        for file in files:
            yield stamp("artefact", path=file, content=b64encode(b"{}").decode())
        yield stamp("exit", code=0, tail="")


def test_prompts_of_the_tree_go_to_modal_and_the_verdict_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.testing.remote.modal_runner.ModalRunner", Elsewhere)
    monkeypatch.setattr(Elsewhere, "asked", [])
    out = tmp_path / "verdict.json"
    monkeypatch.setattr(sys, "argv", ["main.py", "--modal", "--prompts", "conftest.py", "--json", str(out), "--seed=3"])
    assert main.main() == 0
    assert out.read_text() == "{}"
    (job,) = Elsewhere.asked
    assert {"--seed=3", "--prompts=conftest.py"} <= set(job.program)
    assert job.artefact_folders == ("results",)

    outside = tmp_path / "prompts.txt"
    outside.write_text("one\n")
    monkeypatch.setattr(sys, "argv", ["main.py", "--modal", "--prompts", str(outside)])
    assert main.main() == 2
    assert "does not travel to Modal" in capsys.readouterr().err
    assert len(Elsewhere.asked) == 1


def test_help_answers_without_importing_torch() -> None:
    call = "sys.argv = ['main.py', '--help']\ntry: main.main()\nfinally: assert 'torch' not in sys.modules"
    code = f"import sys, main\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-new-tokens" in done.stdout
