"""Systems that serve a workload, found by name: each file here that defines `SYSTEM` is one."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from weft.benchmark.measure import Outcome
from weft.benchmark.workload import Workload
from weft.errors import ConfigError, nearest

if TYPE_CHECKING:  # it loads torch, and who only asks for names should not wait for that
    from weft.benchmark.served_model import ServedModel


@runtime_checkable
class System(Protocol):
    """One system with a model loaded. Its clock starts as a workload arrives, loading and warm-up excluded."""

    version: str

    def run(self, workload: Workload, advance: Callable[[], None]) -> Outcome:
        """Answer all of it, greedily, every request to its full length; `advance` is called as each one ends."""
        ...

    def close(self) -> None:
        """Give back memory and threads. It is not used again."""
        ...


@runtime_checkable
class SystemFactory(Protocol):
    """Loads the model, with room for this workload."""

    def __call__(self, model: "ServedModel", workload: Workload) -> System: ...


def known_systems() -> list[str]:
    """The names of the files of this folder, none of them imported."""
    return sorted(module.name for module in iter_modules(__path__))


def check_system(name: str) -> None:
    """Raise ConfigError, with the known names, if there is no such system."""
    known = known_systems()
    if name not in known:
        raise ConfigError(f"unknown system={name!r}", hint=nearest(name, known))


def find_system(name: str) -> SystemFactory:
    """The system of this name, imported. Raises: ConfigError."""
    check_system(name)
    system: SystemFactory = import_module(f"{__name__}.{name}").SYSTEM
    return system
