"""`main.py --collect`: experiments into rows under `results/`, one after the other, each in a process of its own.

A process that dies takes no row with it: `weft bench` adds each to its file as it comes, and the next experiment begins
anew. Knows no metric and no model; torch is imported to find out what device there is.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal

import weft
from weft.benchmark.experiments import Experiment, known_experiments
from weft.benchmark.progress import Progress
from weft.config import ModelConfig
from weft.errors import ConfigError, nearest

ALL = "all"
_KINDS = {"cpu": "a CPU", "cuda": "a GPU"}
_TREE = Path(weft.__file__).parents[1]
_WEFT = "from weft.cli import main; raise SystemExit(main())"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What became of one experiment.   num_rows: how many it left in the files.   reason: none if it was measured."""

    name: str
    outcome: Literal["measured", "skipped", "failed"]
    num_rows: int = 0
    reason: str = ""

    def __str__(self) -> str:
        rows = "" if self.outcome == "skipped" else f", {self.num_rows} rows"
        return f"{self.name}: {self.outcome}{rows}{self.reason and f': {self.reason}'}"


def chosen(asked: str) -> dict[str, Experiment]:
    """One experiment by its name, or all of them. Raises: ConfigError with the names."""
    known = known_experiments()
    if asked == ALL:
        return known
    names = ", ".join((*known, ALL))
    if not asked:
        raise ConfigError("--collect names no experiment", hint=f"one of {names}")
    if asked not in known:
        close = nearest(asked, (*known, ALL))
        hint = f"one of {names}" if close.startswith("known") else f"{close} It is one of {names}"
        raise ConfigError(f"--collect: no experiment is called {asked!r}", hint=hint)
    return {asked: known[asked]}


def collect(names: Sequence[str], measure: Callable[[str], Ending], progress: Progress) -> int:
    """Each in its turn, whatever became of those before it, and a line on each; the exit status.

    0: all that can run here ran.   1: one failed, or none could run. What was measured stays in either case.
    """
    advance = progress("experiments", len(names))
    endings = []
    for name in names:
        started = monotonic()
        ending = measure(name)
        print(f"{ending} ({monotonic() - started:.0f} s)", flush=True)
        endings.append(ending)
        advance()
    failed = [ending.name for ending in endings if ending.outcome == "failed"]
    measured = [ending for ending in endings if ending.outcome == "measured"]
    kept = sum(ending.num_rows for ending in endings)
    print(f"{len(measured)} of {len(endings)} experiments measured, {kept} rows", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "")
    return 1 if failed or not measured else 0


class Desk:
    """Measures on this machine.

    device: `auto`, `cpu` or `cuda`.   folder: where rows go, a file a device.   file: of all rows, in place of those.
    launch: runs `weft` with these arguments, and gives its exit status.
    """

    def __init__(
        self,
        experiments: "dict[str, Experiment]",
        *,
        device: str,
        folder: Path,
        file: Path | None = None,
        launch: "Callable[[Sequence[str]], int] | None" = None,
    ) -> None:
        """Raises: ConfigError for a device that is not there."""
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"--collect on device={device!r}", hint="auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses")
        from weft.inference.placement import place

        self._kind = place(ModelConfig(model="-", device=device), None).device.type
        self._experiments, self._folder, self._file = experiments, folder, file
        self._launch = launch or _in_a_process

    def measure(self, name: str) -> Ending:
        experiment = self._experiments[name]
        settings = experiment.collected.get(self._kind)
        if settings is None:
            kinds = " or ".join(_KINDS[kind] for kind in experiment.collected)
            return Ending(name=name, outcome="skipped", reason=f"it measures {kinds}, and this is {_KINDS[self._kind]}")
        options = experiment.options(**settings)
        file = self._file or self._folder / results_file(_device_name(getattr(options, "device", "cpu")))
        file.parent.mkdir(parents=True, exist_ok=True)
        before = _num_lines(file)
        arguments = [f"--{option.replace('_', '-')}={value}" for option, value in settings.items()]
        status = self._launch(["bench", name, *arguments, f"--json={file.resolve()}"])
        num_rows = _num_lines(file) - before
        if status:
            reason = f"exit status {status}" if status > 0 else f"ended by signal {-status}"
            return Ending(name=name, outcome="failed", num_rows=num_rows, reason=reason)
        if not num_rows:
            return Ending(name=name, outcome="failed", reason="it left no row")
        return Ending(name=name, outcome="measured", num_rows=num_rows)


def results_file(device: str) -> str:
    """The file of what is measured on this device, a CPU or a GPU by its name.

    >>> results_file("cpu"), results_file("NVIDIA H200")
    ('cpu.jsonl', 'h200.jsonl')
    """
    from weft.testing.snapshots import file_name

    return file_name(device).removeprefix("nvidia-") + ".jsonl"


def _device_name(option: str) -> str:
    """option: an experiment's `device`, as `cuda`."""
    if option == "cpu":
        return option
    import torch

    return torch.cuda.get_device_name(torch.device(option))


def _num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _in_a_process(arguments: Sequence[str]) -> int:
    paths = [str(_TREE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", _WEFT, *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False).returncode
