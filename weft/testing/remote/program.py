"""A program that runs elsewhere, its output printed here as it comes: `main.py --modal`."""

from collections.abc import Sequence
from pathlib import Path

from weft.errors import RemoteError
from weft.testing.remote.artefacts import write_artefact
from weft.testing.remote.events import read_event
from weft.testing.remote.interface import Job, Runner


def run_program(runner: Runner, program: Sequence[str]) -> int:
    """Run a Python file of the tree with its arguments; its exit status.

    Raises: RemoteError where it cannot be run, or its end was not heard of.
    """
    runner.open()
    try:
        return follow_program(runner, program)
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
