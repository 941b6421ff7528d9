"""A worker process seen from the side that compares: it builds its workload once and takes turns when asked."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

from weft.errors import WorkerError

_PROGRAM = Path(__file__).with_name("worker_program.py")


class Turn(NamedTuple):
    """seconds: of each part of the workload.   digest: of what the turn computed."""

    seconds: dict[str, float]
    digest: str


class Worker:
    """Use as `with Worker.of(...)`. parts: the names of what a turn measures."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", errors: Any, timeout_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._name, self._process, self._errors, self._timeout_s = name, process, errors, timeout_s
        self._to, self._from = process.stdin, process.stdout
        self._is_late = False
        self.place: str | None = None
        self.parts: list[str] = []

    @classmethod
    @contextmanager
    def of(
        cls, name: str, tree: Path, *, workload: Path, package: str, options: Mapping[str, Any], timeout_s: float
    ) -> Iterator["Worker"]:
        """A process that imports from `tree`; it has ended when the block is left.

        package: must be found inside of the tree; nothing is asked where it is empty.   timeout_s: of its start and of
            each turn.
        Raises: WorkerError.
        """
        command = [sys.executable, "-P", str(_PROGRAM), str(workload), package, json.dumps(dict(options))]
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
            subprocess.Popen(
                command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors,
            ) as process,
        ):  # fmt: skip
            worker = cls(name, process, errors, timeout_s)
            try:
                ready = worker._read()
                worker.place, worker.parts = ready["ready"], ready["parts"]
                if package and (worker.place is None or not Path(worker.place).is_relative_to(tree.resolve())):
                    raise WorkerError(f"{name} imports {package} from {worker.place}, not from {tree}")
                yield worker
            finally:
                process.kill()
                with suppress(BrokenPipeError):  # of a line that a dead process did not take
                    worker._to.close()

    def turn(self, *, planted: float = 0.0) -> Turn:
        """Raises: WorkerError, with the end of what the process has said."""
        try:
            self._to.write(json.dumps({"planted": planted}) + "\n")
            self._to.flush()
        except BrokenPipeError:
            raise self._failure() from None
        answer = self._read()
        return Turn(answer["seconds"], answer["digest"])

    def _read(self) -> dict[str, Any]:
        watchdog = Timer(self._timeout_s, self._give_up)
        watchdog.start()
        try:
            line = self._from.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _give_up(self) -> None:
        self._is_late = True
        self._process.kill()

    def _failure(self) -> WorkerError:
        status = self._process.wait()
        self._errors.seek(0)
        said = "".join(self._errors.readlines()[-15:]).rstrip()
        hint = f"it was given {self._timeout_s:g} s; see --timeout" if self._is_late else None
        return WorkerError(f"{self._name} ended with status {status}:\n{said}", hint=hint)
