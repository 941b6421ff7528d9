"""A program that runs elsewhere, its output printed here as it comes: `main.py --modal`."""

from collections.abc import Sequence

from weft.errors import RemoteError
from weft.testing.remote.events import read_event
from weft.testing.remote.interface import Job, Runner


def run_program(runner: Runner, program: Sequence[str]) -> int:
    """Run a Python file of the tree with its arguments; its exit status.

    Raises: RemoteError where it cannot be run, or its end was not heard of.
    """
    attempt, code = None, None
    runner.open()
    try:
        for line in runner.run(Job(program=tuple(program))):
            event = read_event(line)
            if event.kind == "begin":
                if attempt is not None:
                    print("the machine was taken away; begun again on another one", flush=True)
                attempt, code = event.attempt, None
                known = ", ".join(f"{name} {value}" for name, value in event.content["environment"].items())
                print(f"{runner.description}: {known}", flush=True)
            elif event.attempt != attempt:
                continue
            elif event.kind == "log":
                print(event.content["text"], flush=True)
            elif event.kind == "exit":
                code = int(event.content["code"])
    finally:
        runner.close()
    if code is None:
        raise RemoteError("the stream of the program's output ended before the program did")
    return code if code >= 0 else 128 - code
