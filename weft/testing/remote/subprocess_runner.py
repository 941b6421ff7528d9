"""A run in a process of this machine, or behind any command that passes a job on: `ssh box 'cd weft && …'`."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from weft.testing.remote.interface import Job
from weft.testing.remote.process import attempt


class SubprocessRunner:
    """Each job is a process of its own."""

    elsewhere = True

    def __init__(self, root: Path, command: Sequence[str] = ()) -> None:
        """root: of the tree.   command: takes a job on stdin and writes its events to stdout, as `process.py` does as a
        program; started in `root`. None is this Python, here.
        """
        self._root, self._command = root, [*command]
        self.description = f"`{' '.join(command)}`" if command else "a process here"

    def open(self) -> None:
        """Nothing to make ready."""

    def run(self, job: Job) -> Iterator[str]:
        return self._run_command(job) if self._command else attempt(job, self._root)

    def _run_command(self, job: Job) -> Iterator[str]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._root,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # so that nothing of it is left when this run is stopped
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended already; that no event comes is the failure
                process.stdin.write(job.to_json())
                process.stdin.close()
            yield from process.stdout
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        finally:
            process.stdout.close()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def close(self) -> None:
        """Each job has ended its process."""
