"""`--weft-runner=subprocess`: what ran elsewhere is told as if it had run here, and what did not run has failed."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

import weft
from weft.testing.remote import inline_runner, session, subprocess_runner

# Imported once, not by each run within.
KEPT = (inline_runner, session, subprocess_runner)
pytest_plugins = ["pytester"]

# A torch for the process elsewhere, which costs nothing to import and sees a GPU.
CONFTEST = """
import os, sys
from types import SimpleNamespace
HERE = os.environ["CONTROLLER"] == str(os.getpid())
if not HERE:
    sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: "NO_GPU" not in os.environ))
"""
ALL_OUTCOMES = """
import pytest
pytestmark = pytest.mark.gpu

def test_passes(request):
    request.node.user_properties.append(("weft_positions", 3))
    print("said there")

def test_fails():
    print("said before it failed")
    assert [1, 2] == [1, 3]

def test_skips(): pytest.skip("not on this one")

@pytest.mark.skip(reason="never")
def test_is_skipped(): ...

@pytest.mark.xfail(reason="known")
def test_xfails(): assert 0

@pytest.mark.xfail(reason="was known", strict=True)
def test_passes_unexpectedly(): ...

@pytest.fixture
def untidy():
    yield
    raise RuntimeError("in teardown")

@pytest.fixture
def broken(): raise RuntimeError("in setup") from ValueError("the cause")

def test_teardown(untidy): ...
def test_setup(broken): ...

class TestClass:
    @pytest.mark.parametrize("value", ["a[b]", "ü::c", "with space"])
    def test_names(self, value): ...
"""
# What the first of them takes is made up: no machine is so busy that it takes another time.
TAKES = """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.name == "test_passes" and call.when == "call":
        report.duration = 123.45
    return report
"""
SUBPROCESS = ("-p", "pytest_weft", "--weft-runner=subprocess")


@pytest.fixture(autouse=True)
def _apart(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTROLLER", str(os.getpid()))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each process would spend a second on them
    monkeypatch.setenv("PYTHONPATH", str(Path(weft.__file__).parents[1]))  # the one that is tested, there too
    pytester.makeconftest(CONFTEST)


def failed_last(pytester: pytest.Pytester) -> set[str]:
    return set(json.loads((pytester.path / ".pytest_cache/v/cache/lastfailed").read_text()))


def test_what_ran_elsewhere_is_told_as_if_it_had_run_here(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    pytester.makepyfile(test_all=ALL_OUTCOMES, test_here="def test_local(): print('said here')")
    pytester.makeconftest(CONFTEST + TAKES)
    told = []
    for options in (("-p", "pytest_weft", "test_here.py", "test_all.py"), SUBPROCESS):
        result = pytester.runpytest(*options, "-v", "-rA", "--durations=0", "--junitxml=out.xml")
        result.assert_outcomes(passed=6, failed=2, skipped=2, xfailed=1, errors=2)
        result.stdout.fnmatch_lines(["123.45s call *test_passes"])
        lines = [line for line in result.outlines if not re.match(r"a process here|=|\(|\d+\.\d+s ", line)]
        xml = re.sub(r'time(stamp)?="[^"]*"', "", (pytester.path / "out.xml").read_text())
        told.append(("\n".join(lines), xml, failed_last(pytester)))
    assert told[0] == told[1]
    assert "said there" in told[1][0]
    assert 'name="weft_positions" value="3"' in told[1][1]


def test_a_dead_worker_fails_every_test_that_it_leaves(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, signal, subprocess, sys, pytest
        from pathlib import Path
        pytestmark = pytest.mark.gpu
        HOLDS = "import time; from pathlib import Path; time.sleep(120); Path('ended').touch()"
        def test_before(): ...
        def test_dies():
            holds = subprocess.Popen([sys.executable, "-c", HOLDS], close_fds=False)  # the pipe, open
            Path("holds").write_text(str(holds.pid))
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        def test_after(): ...
        """
    )
    result = pytester.runpytest(*SUBPROCESS, "-v", "-s")
    assert not (pytester.path / "ended").exists(), "whoever holds the pipe is waited for"
    os.kill(int((pytester.path / "holds").read_text()), signal.SIGKILL)
    result.assert_outcomes(passed=1, failed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*the worker was lost in this test: the process elsewhere was ended by SIGSEGV",
            "*Segmentation fault*",
            "*the worker was lost before this test: *",
            "*! the run elsewhere cannot be believed: the process elsewhere was ended by SIGSEGV*",
        ]
    )
    failures = result.stdout.str().partition("short test summary")[0]  # where CI repeats whole messages
    assert failures.count("the end of its output") == 1
    assert len(failed_last(pytester)) == 2


def test_a_test_that_is_not_there_fails_and_the_others_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from conftest import HERE
        @pytest.mark.gpu
        @pytest.mark.parametrize("name", ["both", "here"] if HERE else ["there", "both"])
        def test_names(name): ...
        """
    )
    result = pytester.runpytest(*SUBPROCESS)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*collected here, and not elsewhere*", "FAILED *test_names[[]here[]]*"])


def test_a_machine_without_a_gpu_is_a_failure(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_GPU", "1")
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_one(): ...\ndef test_here(): ...")
    result = pytester.runpytest(*SUBPROCESS)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*--require-gpu, and torch sees no GPU for 1 tests"])


def test_no_gpu_test_selected_or_all_of_them_skipped_is_red(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_none="def test_here(): ...",
        test_skips="import pytest\n@pytest.mark.gpu\ndef test_one(): pytest.skip('too old')",
    )
    result = pytester.runpytest(*SUBPROCESS, "test_none.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*tests marked gpu are to run elsewhere, and none is selected"])
    result = pytester.runpytest(*SUBPROCESS)
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*no test marked gpu ran: all were skipped*"])


def test_the_first_failure_ends_it_if_asked(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_one(): assert 0\n"
        "def test_two():\n    import time\n    time.sleep(60)"
    )
    result = pytester.runpytest(*SUBPROCESS, "-x")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])


def test_what_measures_runs_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, pytest
        pytestmark = pytest.mark.gpu
        def test_a(record_property): record_property("process", os.getpid())
        @pytest.mark.perf
        def test_speed(record_property): record_property("process", os.getpid())
        def test_b(record_property): record_property("process", os.getpid())
        """
    )
    pytester.runpytest(*SUBPROCESS, "--junitxml=out.xml").assert_outcomes(passed=3)
    first, second, alone = re.findall(r'"process" value="(\d+)"', (pytester.path / "out.xml").read_text())
    assert first == second != alone


def test_snapshots_of_tests_elsewhere_stay(pytester: pytest.Pytester) -> None:
    """Syrupy here would take them for the leavings of tests that have passed without."""
    pytester.makepyfile(
        """
        import pytest
        def test_here(snapshot): assert "here" == snapshot
        @pytest.mark.gpu
        def test_there(snapshot): assert "there" == snapshot
        """
    )
    for options in (("--snapshot-update",), (), ("--snapshot-update",)):
        result = pytester.runpytest(*SUBPROCESS, "-p", "syrupy", *options)
        result.assert_outcomes(passed=2)
        assert result.ret == 0
        (file,) = (pytester.path / "__snapshots__").glob("*.ambr")
        assert all(name in file.read_text() for name in ("# name: test_here", "# name: test_there"))


# Stands in for a rented machine: the tree is copied, and the job runs in the copy.
ELSEWHERE = """
import pathlib, shutil, sys, tempfile, os
from weft.testing.remote.process import main
folder = tempfile.mkdtemp()
shutil.copytree(".", folder, dirs_exist_ok=True)
os.chdir(folder)
sys.exit(main())
"""


def through(pytester: pytest.Pytester, script: str) -> None:
    """Jobs are passed to this program."""
    file = pytester.path / "elsewhere.program"
    file.write_text(script)
    pytester.makeini(f"[pytest]\nweft_remote_command = {sys.executable} {file}\n")


def test_baselines_come_back_and_nothing_else(pytester: pytest.Pytester) -> None:
    through(pytester, ELSEWHERE)
    pytester.makepyfile(
        """
        import pathlib, pytest
        @pytest.mark.gpu
        def test_writes():
            pathlib.Path("baselines/h200").mkdir(parents=True)
            pathlib.Path("baselines/h200/new.json").write_text("{}")
            pathlib.Path("stray.json").write_text("{}")
        """
    )
    result = pytester.runpytest(*SUBPROCESS)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*tests that ran elsewhere*", "written: baselines/h200/new.json"])
    assert [file.name for file in pytester.path.rglob("*.json")] == ["new.json"]


def says(*events: dict[str, object]) -> str:
    return "\n".join(f"print({json.dumps(json.dumps(event))})" for event in events)


def event(attempt: str, number: int, kind: str, **content: object) -> dict[str, object]:
    return {"attempt": attempt, "number": number, "kind": kind, "content": content}


def test_an_artefact_that_leads_out_of_its_folder_is_red(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_a="import pytest\n@pytest.mark.gpu\ndef test_one(): ...")
    node_id = "test_a.py::test_one"
    place = {"nodeid": node_id, "location": ["test_a.py", 1, "test_one"]}
    common = {**place, "keywords": {}, "outcome": "passed", "longrepr": None, "$report_type": "TestReport"}
    reports = [{**common, "when": when} for when in ("setup", "call", "teardown")]
    events = [
        event("A", 0, "start", **place),
        *(event("A", number, "report", report=report) for number, report in enumerate(reports, start=1)),
        event("A", 4, "finish", **place),
        event("A", 5, "artefact", path="baselines/../conftest.py", content=""),
        event("A", 6, "exit", code=0, tail=""),
    ]
    through(pytester, says(*reversed(events)))
    before = (pytester.path / "conftest.py").read_text()
    result = pytester.runpytest(*SUBPROCESS, "-v")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*cannot be believed: an artefact that *leaves the tree: 'baselines/../conftest.py'*"])
    assert (pytester.path / "conftest.py").read_text() == before


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import sys; sys.exit('no route')", "nothing was heard of the run elsewhere"),
        ("print('Welcome to the box!')", "RemoteError: a line that is no event: 'Welcome to the box!"),
        (
            says(event("A", 0, "start", nodeid="test_a.py::test_speed"), event("B", 0, "exit", code=0, tail="")),
            "begun in an attempt that was lost; a measurement never spans two",
        ),
        (
            says(
                event("A", 0, "start", nodeid="test_a.py::test_speed"),
                event("A", 1, "report", report={"nodeid": "test_a.py::test_speed", "when": "teardown"}),
                event("A", 2, "finish", nodeid="test_a.py::test_speed"),
                event("A", 3, "exit", code=0, tail=""),
            ),
            "no report of a test",
        ),
    ],
    ids=["silence", "noise", "two attempts", "no report"],
)
def test_what_cannot_be_believed_is_a_failed_test(pytester: pytest.Pytester, script: str, reason: str) -> None:
    through(pytester, script)
    pytester.makepyfile(test_a="import pytest\n@pytest.mark.gpu\n@pytest.mark.perf\ndef test_speed(): ...")
    result = pytester.runpytest(*SUBPROCESS)
    result.assert_outcomes(failed=1)
    assert reason in result.stdout.str()


def test_in_this_very_process(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_all=ALL_OUTCOMES)
    inline = ("-p", "pytest_weft", "--weft-runner=inline", "-v")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    pytester.runpytest(*inline).assert_outcomes(passed=5, failed=2, skipped=2, xfailed=1, errors=2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = pytester.runpytest(*inline)
    result.assert_outcomes(skipped=11)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_workers_of_xdist_and_another_machine_exclude_each_other(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_one(): ...")
    xdist = ("-p", "xdist.plugin", *SUBPROCESS)
    for option in ("-n2", "--numprocesses=1", "--tx=popen"):
        dist = ("--dist=load",) if option.startswith("--tx") else ()
        result = pytester.runpytest(*xdist, option, *dist)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"*{option.partition('=')[0]}* exclude each other"])
    pytester.makeini("[pytest]\naddopts = --numprocesses=2 --dist=loadscope")
    pytester.runpytest(*xdist).assert_outcomes(passed=1)


@pytest.mark.parametrize("arguments", [("--modal=V100",), ("--modal=",), ("--modal", "test_one.py")])
def test_gpus_are_known_by_name(pytester: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    pytester.makepyfile(test_one="import pytest\n@pytest.mark.gpu\ndef test_one(): ...")
    result = pytester.runpytest("-p", "pytest_weft", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no GPU is named *", "hint: *"])
