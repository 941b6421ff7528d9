"""Experiments, found by name: each file here that defines `EXPERIMENT` is one. Cheap to import: no torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from weft.benchmark.progress import Progress
from weft.benchmark.row import Row

# Of an experiment that is the same whatever device there is: its `collected`.
ANYWHERE: Mapping[str, Mapping[str, Any]] = {"cpu": {}, "cuda": {}}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """summary: one line, what it measures.   examples: command lines without `weft bench`.

    options: a frozen dataclass of `option` fields; building it raises ConfigError for what makes no sense.
    run: raises at once what options, model and machine have against each other, and then gives rows, targets included,
        as they come or all at the end; nothing is measured, and no weight read, before the first row is asked for.
    collected: by the kind of device (`cpu`, `cuda`) what `main.py --collect` sets of the options there; on a kind that
        is not named the experiment says nothing.
    """

    summary: str
    examples: tuple[str, ...]
    options: type[Any]
    run: Callable[[Any, Progress], Iterator[Row]]
    collected: Mapping[str, Mapping[str, Any]]


def known_experiments() -> dict[str, Experiment]:
    """Every experiment of this folder, by the name of its file."""
    modules = {module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)}
    return {name: module.EXPERIMENT for name, module in modules.items() if hasattr(module, "EXPERIMENT")}
