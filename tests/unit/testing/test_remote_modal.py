"""Modal's own client as far as it goes without an account; without the client, the error that says so."""

import os
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import main
from tests.unit.testing.modal_server import modal_server
from tests.unit.testing.test_remote_session import CONFTEST
from weft.errors import RemoteError
from weft.testing.remote import modal_runner
from weft.testing.remote.events import Stamp, read_event
from weft.testing.remote.interface import Job, Runner
from weft.testing.remote.modal_runner import ModalRunner, left_out
from weft.testing.remote.program import follow_program, run_program
from weft.testing.remote.subprocess_runner import SubprocessRunner

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def modal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The client, and no account."""
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none.toml"))
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    return pytest.importorskip("modal", reason="the client is in a group of its own: uv run --group modal pytest")


def test_without_the_client_the_error_names_the_way_to_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_one(): ...\ndef test_here(): ...")
    result = pytester.runpytest("-p", "pytest_weft", "--modal")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the package modal is not installed", "hint: uv sync --group modal*"])
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["main.py", "--modal"])
    assert main.main() == 2
    assert "the package modal is not installed" in capsys.readouterr().err


def test_app_image_volumes_and_function_are_built_without_a_word_to_modal(modal: ModuleType) -> None:
    app, function = modal_runner.build(modal, ROOT, "H100!", may_fetch=False)
    assert app.name == "weft-tests"
    assert isinstance(function, modal.Function)


@pytest.mark.filterwarnings("ignore:.*will not have access to the mounted Volume:UserWarning")
def test_the_function_runs_a_job_to_its_end(modal: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "says.py").write_text("print('hello')")
    monkeypatch.chdir(tmp_path)
    _, function = modal_runner.build(modal, ROOT, "H100!", may_fetch=True)
    events = [read_event(line) for line in function.local(Job(program=("says.py",)).to_json())]
    assert [event.kind for event in events] == ["begin", "log", "exit"]
    assert events[1].content == {"text": "hello"}


def test_without_a_token_nothing_is_run(modal: ModuleType) -> None:
    with pytest.raises(RemoteError, match=r"(?s)does not know who asks: Token missing.*hint: `modal token new`"):
        ModalRunner(ROOT, "H100!").open()


@pytest.mark.parametrize("restarts", [False, True])
def test_modals_client_brings_reports_over_its_own_protocol(
    modal: ModuleType, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """Against a server in this process, which runs the function that it is sent."""
    from modal.client import Client

    pytester.makepyprojecttoml('[project]\nname = "any"\nversion = "1"')
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        "import pytest\n@pytest.mark.gpu\ndef test_one(): print('said there')\n"
        "@pytest.mark.gpu\n@pytest.mark.perf\ndef test_speed(): ...\ndef test_here(): ..."
    )
    environment = {"CONTROLLER": str(os.getpid()), "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with modal_server(restarts=restarts) as (address, calls):
        monkeypatch.setenv("MODAL_SERVER_URL", address)
        result = pytester.runpytest("-p", "pytest_weft", "--modal=h200", "-rA", "-W", "ignore::ResourceWarning")
        Client.from_env().__exit__(None, None, None)  # closed; else the next test has it too
    result.assert_outcomes(passed=3 - restarts, failed=int(restarts))
    result.stdout.fnmatch_lines(["*said there*"])
    if restarts:
        result.stdout.fnmatch_lines(["begun in an attempt that was lost; a measurement never spans two*"])
    asked = calls.function.function
    assert (asked.resources.gpu_config.gpu_type, asked.single_use_containers) == ("H200", True)
    assert b"weft.testing.remote.modal_runner" in asked.function_serialized
    assert len(asked.function_serialized) < 200, "by name, and nothing of it by value"
    mounts = {mount.mount_path: mount.read_only for mount in asked.volume_mounts}
    assert mounts == {"/cache/huggingface": True, "/cache/triton": False}
    assert calls.said.count("FunctionMap") == 2, "what measures is a job of its own"
    assert calls.said[-1] == "AppClientDisconnect"


def test_what_git_ignores_stays_here() -> None:
    stays = left_out(ROOT)
    assert not stays(Path("weft/errors.py"))
    assert stays(Path(".venv/bin/python"))
    assert stays(Path("uv.lock"))


def test_without_git_what_is_hidden_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    stays = left_out(tmp_path)
    assert not stays(Path("weft/errors.py"))
    assert stays(Path(".venv/bin/python"))
    assert stays(Path("weft/__pycache__/errors.pyc"))


def test_a_program_prints_here_and_its_status_is_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint('one', sys.argv[1])\nsys.exit(3)")
    (tmp_path / "dies.py").write_text("import os\nos.kill(os.getpid(), 9)")
    runner = SubprocessRunner(tmp_path)
    assert run_program(runner, ["program.py", "--two"]) == 3
    assert capsys.readouterr().out.splitlines()[1:] == ["one --two"]
    assert run_program(runner, ["dies.py"]) == 137


class Told:
    """A runner that says these lines."""

    description = "told"
    elsewhere = True
    closed = False

    def __init__(self, *lines: str) -> None:
        self.lines = lines

    def open(self) -> None: ...

    def run(self, job: Job) -> Iterator[str]:
        yield from self.lines

    def close(self) -> None:
        self.closed = True


def attempt_of(name: str, text: str, *, code: int | None) -> list[str]:
    stamp = Stamp(name)
    lines = [stamp("begin", environment={}), stamp("log", text=text)]
    return lines if code is None else [*lines, stamp("exit", code=code, tail="")]


def test_the_last_attempt_decides(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = attempt_of("A", "first", code=0), attempt_of("B", "second", code=1)
    runner: Any = Told(*first[:2], *second[:1], first[2], *second[1:])
    assert isinstance(runner, Runner)
    assert run_program(runner, ["main.py"]) == 1
    assert "taken away" in capsys.readouterr().out
    assert runner.closed


def test_a_program_of_whose_end_nothing_is_heard_has_not_ended_well() -> None:
    first, second = attempt_of("A", "first", code=0), attempt_of("B", "second", code=None)
    for lines in ([], second, [*first, *second]):
        with pytest.raises(RemoteError, match="ended before the program did"):
            run_program(Told(*lines), ["main.py"])


def test_what_a_program_writes_comes_to_its_place_here_whatever_its_status(tmp_path: Path) -> None:
    for code in (0, 1):
        stamp, here = Stamp("A"), tmp_path / f"{code}.json"
        artefact = stamp("artefact", path="results/v.json", content=b64encode(b"{}").decode())
        lines = [stamp("begin", environment={}), artefact, stamp("exit", code=code, tail="")]
        assert run_program(Told(*lines), ["main.py"], brings={"results/v.json": here}) == code
        assert here.read_text() == "{}"
    failed = attempt_of("A", "wrong arguments", code=2)
    assert run_program(Told(*failed), ["main.py"], brings={"results/v.json": tmp_path / "none"}) == 2
    with pytest.raises(RemoteError, match=r"left no results/v\.json"):
        run_program(Told(*attempt_of("A", "", code=0)), ["main.py"], brings={"results/v.json": tmp_path / "none"})
    assert not (tmp_path / "none").exists()


def test_files_of_a_lost_attempt_are_not_taken_over(tmp_path: Path) -> None:
    lines = []
    for attempt, files in (("A", ("lost", "both")), ("B", ("both",))):
        stamp = Stamp(attempt)
        content = b64encode(attempt.encode()).decode()
        lines += [stamp("begin", environment={})]
        lines += [stamp("artefact", path=f"results/{name}", content=content) for name in files]
        lines += [stamp("exit", code=0, tail="")]
    assert follow_program(Told(*lines), ["main.py"], folders=["results"], into=tmp_path) == 0
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["both"]
    assert (tmp_path / "results" / "both").read_text() == "B"
