"""Scheduling policies, found by name: each file here that defines `POLICY` is one. No torch."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, runtime_checkable

from weft.errors import ConfigError, nearest
from weft.inference.request import Request


@runtime_checkable
class Policy(Protocol):
    """Says in which order requests may take the step's budget; the scheduler says how much each gets."""

    def candidates(self, running: Sequence[Request], waiting: Sequence[Request]) -> Iterator[Request]:
        """Requests in the order to be served; one that is not named gets nothing in this step."""
        ...


@runtime_checkable
class PolicyFactory(Protocol):
    """Builds a policy for an engine that runs at most `max_num_seqs` requests at once."""

    def __call__(self, *, max_num_seqs: int) -> Policy: ...


def known_policies() -> dict[str, PolicyFactory]:
    """Every policy of this folder, by the name of its file."""
    modules = {module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)}
    return {name: module.POLICY for name, module in modules.items() if hasattr(module, "POLICY")}


def find_policy(name: str) -> PolicyFactory:
    """The policy of this name. Raises: ConfigError with the known names."""
    known = known_policies()
    if name not in known:
        raise ConfigError(f"unknown policy={name!r}", hint=nearest(name, known))
    return known[name]
