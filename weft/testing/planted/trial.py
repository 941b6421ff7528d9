"""One run of some tests in one copy of the tree, by a process that has the slow imports behind it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import WeftError

_STEM = Path(__file__).with_name("stem.py")
# A plugin that a fault's few tests have no use for costs each of them its start.
_ARGUMENTS = (
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio", "-o", "addopts="),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what was imported before the fork
    *("-q", "--tb=short", "--no-header", "--color=no"),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of the tests.

    exit_code: pytest's; None where the time ran out, negative where a signal ended it.
    passed, failed: node ids.   errors: of tests that failed outside of themselves, in set-up, tear-down or collection.
    no_program: tests in which a name was unknown or a text no Python.   strayed: modules from outside the copy.
    output: the end of what was printed.
    """

    seconds: float
    exit_code: int | None
    passed: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    errors: frozenset[str] = frozenset()
    no_program: frozenset[str] = frozenset()
    strayed: tuple[str, ...] = ()
    output: str = ""


class Stem:
    """A process that makes the slow imports once, and its lanes, each of which runs one trial after the other."""

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str], num_lanes: int) -> None:
        """preload: modules to import first.   environment: set before that, and for every trial."""
        pairs = [socket.socketpair() for _ in range(num_lanes)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        self._process = subprocess.Popen(
            # -P: nothing beside the file can be imported
            [sys.executable, "-P", str(_STEM), ",".join(map(str, descriptors)), *preload],
            stdin=subprocess.DEVNULL,
            env={**_without_pythonpath(), **environment},
            cwd=_STEM.parent.anchor,
            pass_fds=descriptors,
            process_group=0,  # a terminal's Ctrl-C is for the run, which ends its lanes
        )
        for _, theirs in pairs:
            theirs.close()
        self.lanes = tuple(Lane(ours, number) for number, (ours, _) in enumerate(pairs))

    def close(self) -> None:
        """End the process, its lanes, and whatever tests they run."""
        # Before the sockets: who waits for an answer holds one, and gets none when its lane has ended.
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for lane in self.lanes:
            lane.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)


class Lane:
    """Runs trials, each in a fork of what has been imported."""

    def __init__(self, own: socket.socket, number: int) -> None:
        self._socket, self._number = own, number
        self._line = own.makefile("rw", encoding="utf-8")
        self._is_ready = False

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end may be closed
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever waits for an answer waits no longer
        self._line.close()
        self._socket.close()

    def run(
        self,
        folder: Path,
        tests: Sequence[str],
        *,
        timeout_s: float,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Trial:
        """Run these files and node ids in this copy of the tree."""
        output, report = (folder.with_name(f"{folder.name}.{self._number}.{kind}") for kind in ("output", "report"))
        job = {
            "folder": str(folder),
            "arguments": [*_ARGUMENTS, f"--rootdir={folder}", *arguments, *tests],
            "environment": dict(environment or {}),
            "output": str(output),
            "report": str(report),
            "timeout_s": timeout_s,
        }
        if not self._is_ready:  # the imports are being made
            self._answer()
            self._is_ready = True
        print(json.dumps(job), file=self._line, flush=True)
        answer = self._answer()
        found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        printed = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        for path in (output, report):
            path.unlink(missing_ok=True)
        return Trial(
            seconds=answer["seconds"],
            exit_code=answer["exit_code"],
            passed=frozenset(found.get("passed", ())),
            failed=frozenset(found.get("failed", ())),
            errors=frozenset(found.get("errors", ())),
            no_program=frozenset(found.get("no_program", ())),
            strayed=tuple(found.get("strayed", ())),
            output=printed[-4000:],
        )

    def _answer(self) -> dict[str, Any]:
        line = self._line.readline()
        if not line:
            raise WeftError("the process that runs the tests of planted faults has ended")
        return dict(json.loads(line))


def _without_pythonpath() -> dict[str, str]:
    """PYTHONPATH names the original tree more often than not, and pytest's own variables change what runs."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS", "CI")}
