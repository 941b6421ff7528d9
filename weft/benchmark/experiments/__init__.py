"""Experiments, found by name: each file here that defines `EXPERIMENT` is one. Cheap to import: no torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from weft.benchmark.progress import Progress
from weft.benchmark.row import Row


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """summary: one line, what it measures.   examples: command lines without `weft bench`.

    options: a frozen dataclass of `option` fields; building it raises ConfigError for what makes no sense.
    run: measures and gives out the rows, targets included, as they come or all at the end.
    """

    summary: str
    examples: tuple[str, ...]
    options: type[Any]
    run: Callable[[Any, Progress], Iterable[Row]]


def known_experiments() -> dict[str, Experiment]:
    """Every experiment of this folder, by the name of its file."""
    modules = {module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)}
    return {name: module.EXPERIMENT for name, module in modules.items() if hasattr(module, "EXPERIMENT")}
