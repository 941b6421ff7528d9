"""A program that runs elsewhere, its output printed here as it comes: `main.py --modal`."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from weft.errors import RemoteError
from weft.testing.remote.artefacts import write_artefact
from weft.testing.remote.events import read_event
from weft.testing.remote.interface import Job, Runner


def run_program(runner: Runner, program: Sequence[str], *, brings: Mapping[str, Path] | None = None) -> int:
    """Run a Python file of the tree with its arguments; its exit status.

    brings: files that the program writes there, relative to the root and in a folder, and where they come to here.
    Raises: RemoteError where it cannot be run, its end was not heard of, or it ended well and left such a file out.
    """
    brings = brings or {}
    folders = sorted({str(Path(there).parent) for there in brings})
    runner.open()
    try:
        with TemporaryDirectory() as scratch:
            status = follow_program(runner, program, folders=folders, into=Path(scratch))
            for there, here in brings.items():
                written = Path(scratch) / there
                if written.exists():
                    shutil.copyfile(written, here)
                elif status == 0:
                    raise RemoteError(f"the program ended well and left no {there}, which {here} was to be")
        return status
    finally:
        runner.close()


def follow_program(
    runner: Runner, program: Sequence[str], *, folders: Sequence[str] = (), into: Path | None = None
) -> int:
    """The same by a runner that is open.

    folders, into: what changed in these folders, relative to the root there, is written to the same places below
    `into`, whatever the exit status; of an attempt that was lost, nothing.
    """
    attempt, code = None, None
    artefacts: dict[str, str] = {}
    for line in runner.run(Job(program=tuple(program), artefact_folders=tuple(folders))):
        event = read_event(line)
        if event.kind == "begin":
            if attempt is not None:
                print("the machine was taken away; begun again on another one", flush=True)
            attempt, code, artefacts = event.attempt, None, {}
            known = ", ".join(f"{name} {value}" for name, value in event.content["environment"].items())
            print(f"{runner.description}: {known}", flush=True)
        elif event.attempt != attempt:
            continue
        elif event.kind == "log":
            print(event.content["text"], flush=True)
        elif event.kind == "artefact":
            artefacts[event.content["path"]] = event.content["content"]
        elif event.kind == "exit":
            code = int(event.content["code"])
    if code is None:
        raise RemoteError("the stream of the program's output ended before the program did")
    for path, content in artefacts.items():
        assert into is not None, "files came back that nobody asked for"
        write_artefact(into, folders, path, content)
    return code if code >= 0 else 128 - code
