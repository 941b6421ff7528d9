"""What a worker process runs: the workload of one commit, a turn whenever a line comes in. Imports nothing of weft.

It is this file of the tree that compares, run on another tree's weft. Lines in and out are JSON objects; a turn is
asked for by {"planted": part}, and answered by {"seconds": {name: seconds}, "digest": text}.
"""

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

Parts = dict[str, Callable[[], object]]


def main(workload: str, package: str, options: str) -> None:
    """package: whose place is told first, so that nobody measures the wrong tree."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    parts = _build(workload, json.loads(options))
    spec = importlib.util.find_spec(package) if package else None
    _answer(answers, {"ready": None if spec is None else spec.origin, "parts": list(parts)})
    for line in sys.stdin:
        _answer(answers, turn(parts, planted=json.loads(line)["planted"]))


def turn(parts: Parts, *, planted: float) -> dict[str, Any]:
    """Every part in its order. planted: so much of a part's own time is waited out in it, without leave to others."""
    seconds, found = {}, []
    for name, part in parts.items():
        start = perf_counter()
        found.append(part())
        elapsed = perf_counter() - start
        while perf_counter() - start < elapsed * (1 + planted):
            pass
        seconds[name] = perf_counter() - start
    return {"seconds": seconds, "digest": hashlib.sha256(repr(found).encode()).hexdigest()}


def _build(workload: str, options: dict[str, Any]) -> Parts:
    spec = importlib.util.spec_from_file_location("workload", Path(workload))
    assert spec is not None, f"{workload} is no Python file"
    assert spec.loader is not None, f"{workload} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parts: Parts = module.build(options)
    return parts


def _answer(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
