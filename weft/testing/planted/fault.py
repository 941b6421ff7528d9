"""What a planted fault and a catalogue of them are. Knows no tree and runs nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from weft.errors import ConfigError

Expectation = Literal["killed", "survives"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One replacement of text, and the tests that must see it.

    file: under the root of the tree, with slashes.   old: occurs exactly once in it.   new: takes its place.
    why: what is wrong now, in one sentence, and the public report if there is one.
    tier: the kind of test that has to see it; every killer's path begins with it.
    killers: files or node ids; only these run, and in each of them a test has to fail.
    expect: `survives` for an equivalent one, which proves that a kill is no accident of being looked at.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tier: str
    killers: tuple[str, ...]
    expect: Expectation = "killed"

    def __post_init__(self) -> None:
        if self.old == self.new or not self.old:
            raise ConfigError(f"fault {self.name!r} changes nothing")
        if not self.killers:
            raise ConfigError(f"fault {self.name!r} names no test", hint="killers: files or node ids")
        for killer in self.killers:
            if not killer.startswith(f"{self.tier}/"):
                raise ConfigError(f"fault {self.name!r}: {killer!r} is no test of the tier {self.tier!r}")


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Faults by the part of the program that they are in, and what a run of its tests needs.

    sources: files and folders under the root that are copied.
    preload: modules of others that the tests import; imported once, before a process is forked for each fault.
    arguments: further ones for pytest.   environment: set for the tests.
    timeout_s: how long one fault's tests may take, in seconds; more is a verdict of its own.
    """

    parts: Mapping[str, Sequence[Fault]]
    sources: tuple[str, ...]
    preload: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        counts = Counter(fault.name for fault in self.faults)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ConfigError(f"several faults are called {twice[0]!r}")

    @property
    def faults(self) -> tuple[Fault, ...]:
        """All of them, in the order of the parts."""
        return tuple(fault for faults in self.parts.values() for fault in faults)

    def part_of(self, fault: Fault) -> str:
        return next(part for part, faults in self.parts.items() if fault in faults)

    def named(self, name: str) -> tuple[Fault, ...]:
        """The fault of this name, or all of the part of this name. Raises: ConfigError with the nearest."""
        if name in self.parts:
            return tuple(self.parts[name])
        found = tuple(fault for fault in self.faults if fault.name == name)
        if not found:
            close = get_close_matches(name, [*self.parts, *(fault.name for fault in self.faults)], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "parts: " + ", ".join(self.parts)
            raise ConfigError(f"no planted fault and no part is called {name!r}", hint=hint)
        return found
