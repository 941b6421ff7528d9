"""A process that imports what tests need of other projects, then forks lanes that fork one process for each job.

Run as a file, by `trial.py`: it must not import the package that is judged, so that each fork finds its own copy of it.
Importing torch takes longer than most killers; forked, a fault costs its tests. A lane reads jobs from a socket and
answers there, one JSON object a line.

    job     {"folder", "arguments", "environment", "output", "report", "timeout_s"}
    answer  {"seconds", "exit_code": null where the time ran out, negative where a signal ended it}
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_PROGRAM_ERRORS = (NameError, SyntaxError, ImportError)  # what is raised by a text that is no program


class Recorder:
    """Notes what became of each test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.errors: list[str] = []  # outside of a test proper: set-up, tear-down, collection
        self.no_program: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        if call.excinfo is not None and isinstance(call.excinfo.value, _PROGRAM_ERRORS):
            self.no_program.append(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            (self.failed if report.when == "call" else self.errors).append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report.nodeid)

    def found(self) -> dict[str, Any]:
        names = {path.stem for path in self._folder.iterdir() if path.suffix in ("", ".py")}
        files = {
            name: getattr(module, "__file__", None)
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] in names
        }
        strayed = [name for name, file in files.items() if file and self._folder not in Path(file).resolve().parents]
        return {
            "passed": self.passed,
            "failed": self.failed,
            "errors": self.errors,
            "no_program": self.no_program,
            "loaded": sorted(files),
            "strayed": sorted(strayed),
        }


def run_tests(job: dict[str, Any]) -> int:
    """In a process of its own: pytest in the job's folder; its report, then its exit status."""
    folder = Path(job["folder"]).resolve()
    os.setsid()  # so that whatever the tests start ends with them
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(job["environment"], PYTHONPATH=str(folder))  # for tests that start processes
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    recorder = Recorder(folder)
    exit_code = int(pytest.main(job["arguments"], plugins=[recorder]))
    Path(job["report"]).write_text(json.dumps(recorder.found()), encoding="utf-8")
    return exit_code


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait, and end whatever is left."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        exit_code = 3  # as pytest's own for an internal error
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the tests' own is what every program has
            exit_code = run_tests(job)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
    status: int | None = None
    try:
        while status is None and time.monotonic() - began < job["timeout_s"]:
            ended, code = os.waitpid(child, os.WNOHANG)
            status = code if ended else None
            if status is None:
                time.sleep(0.02)
    finally:  # also where this process is to end: nobody may write into the copy any more
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.kill(child, signal.SIGKILL)  # who was not yet at the head of a group
            os.waitpid(child, 0)
    ended_with = None if status is None else os.waitstatus_to_exitcode(status)
    return {"seconds": time.monotonic() - began, "exit_code": ended_with}


def leave(number: int, frame: object) -> None:
    """End after what has to be tidied up, and say nothing of it."""
    sys.exit(128 + number)


def lane(own: socket.socket) -> None:
    """One job after the other, until nobody can ask for more, or SIGTERM."""
    with own.makefile("rw", encoding="utf-8") as line:
        print("{}", file=line, flush=True)  # ready
        for job in line:
            print(json.dumps(serve(json.loads(job))), file=line, flush=True)


def main(descriptors: list[int], preload: list[str]) -> None:
    """descriptors: of a socket for each lane."""
    signal.signal(signal.SIGTERM, leave)
    os.dup2(2, 1)  # what an import prints is no table of verdicts
    for name in preload:
        importlib.import_module(name)
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for own in sockets:
        if os.fork() == 0:
            for other in sockets:
                if other is not own:
                    other.close()  # so that a lane that dies is seen to
            lane(own)
            return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the lanes, which are waited for
    for own in sockets:
        own.close()
    for _ in sockets:
        os.wait()


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1].split(",")], sys.argv[2:])
