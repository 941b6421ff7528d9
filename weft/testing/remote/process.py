"""One attempt at a job: pytest, or a program, in a process of its own, and its events a line each.

What runs may end at any moment, as a fault of a kernel ends a process: the stream stays, and says so. On another
machine:

    python -m weft.testing.remote.process < job.json        in the root of the tree
"""

import json
import os
import platform
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from weft.testing.remote import worker
from weft.testing.remote.artefacts import changed, fingerprints
from weft.testing.remote.events import Stamp
from weft.testing.remote.interface import Job

_TAIL = 6000  # characters of output that are kept of a run that ended badly
_LEAST_WAIT_S = 0.2


def attempt(job: Job, root: Path) -> Iterator[str]:
    """Run it in `root`, and yield its events. Closing the generator ends the process."""
    stamp = Stamp(uuid4().hex)
    yield stamp("begin", environment=environment())
    if job.program:
        yield from _run_program(job, root, stamp)
    else:
        yield from _run_tests(job, root, stamp)


def _run_tests(job: Job, root: Path, stamp: Stamp) -> Iterator[str]:
    before = fingerprints(root, job.artefact_folders)
    reading, writing = os.pipe()
    with TemporaryDirectory() as name:
        folder = Path(name)
        job_file, output = folder / "job.json", folder / "output"
        job_file.write_text(job.to_json(), encoding="utf-8")
        with output.open("wb") as file:
            process = subprocess.Popen(
                _pytest_command(job, cache=folder / "cache"),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=root,
                env={**_environment_of_tests(), worker.JOB: str(job_file), worker.DESCRIPTOR: str(writing)},
                pass_fds=(writing,),
            )
        os.close(writing)
        try:
            for line in _lines(reading, process):
                told = json.loads(line)
                yield stamp(told["kind"], **told["content"])
            code = process.wait()
        finally:
            os.close(reading)
            process.kill()
            process.wait()
        tail = output.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
    if code in (0, 1):
        for path, content in changed(root, job.artefact_folders, before):
            yield stamp("artefact", path=path, content=content)
    yield stamp("exit", code=code, tail=tail)


def _run_program(job: Job, root: Path, stamp: Stamp) -> Iterator[str]:
    before = fingerprints(root, job.artefact_folders)
    process = subprocess.Popen(
        [sys.executable, *job.program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=root,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield stamp("log", text=line.rstrip("\n"))
        code = process.wait()
    finally:
        process.stdout.close()
        process.kill()
        process.wait()
    for path, content in changed(root, job.artefact_folders, before):
        yield stamp("artefact", path=path, content=content)
    yield stamp("exit", code=code, tail="")


def _pytest_command(job: Job, cache: Path) -> list[str]:
    files = dict.fromkeys(node_id.partition("::")[0] for node_id in job.node_ids)
    # Where the dependencies alone are installed, and the tree is beside them, the plugin has no entry point.
    by_name = not os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD") and entry_points(group="pytest11", name="weft")
    plugins = ["-p", worker.__name__, *(() if by_name else ("-p", "pytest_weft"))]
    # What failed last is for the run that asked to keep.
    own_cache = () if "no:cacheprovider" in job.arguments else ("-o", f"cache_dir={cache}")
    return [sys.executable, "-m", "pytest", *plugins, *job.arguments, *own_cache, *files]


def _environment_of_tests() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}


def _lines(descriptor: int, process: "subprocess.Popen[bytes]") -> Iterator[bytes]:
    """Whole lines until the process has ended: a child that it left behind may hold the pipe open for longer."""
    rest = b""
    while True:
        has_ended = process.poll() is not None  # asked before the look: what it wrote is there by now
        ready, _, _ = select.select([descriptor], [], [], 0 if has_ended else _LEAST_WAIT_S)
        chunk = os.read(descriptor, 1 << 16) if ready else b""
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        if not chunk and (ready or has_ended):
            return


def environment() -> dict[str, str]:
    """What this machine runs on, without importing it."""
    found = {"python": platform.python_version(), **{name: _version(name) for name in ("torch", "triton")}}
    return {name: value for name, value in {**_gpu(), **found}.items() if value}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _gpu() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60).stdout.splitlines()
    if not answer or answer[0].count(",") != 1:
        return {}
    name, driver = answer[0].split(",")
    return {"gpu": f"{len(answer)} x {name.strip()}", "driver": driver.strip()}


def main(arguments: Sequence[str] = ()) -> int:
    """A job on stdin, its events on stdout."""
    job = Job.from_json(sys.stdin.read())
    for line in attempt(job, Path.cwd()):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
