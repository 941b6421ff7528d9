"""How options are declared: unknown names and values out of range are errors. Knows no option by name."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from weft.errors import ConfigError, UnknownArgumentError, shown

Config = TypeVar("Config")
Given = ParamSpec("Given")
Result = TypeVar("Result")


def strict(cls: type[Config], *, unsupported: Mapping[str, str] = MappingProxyType({})) -> type[Config]:
    """Class decorator: an unknown keyword is an error that names the nearest known one.

    unsupported: names that people know from elsewhere, and for each a hint at what is there instead.
    """
    construct = cls.__init__
    known = {item.name for item in fields(cls)}  # type: ignore[arg-type]  # decorates dataclasses only

    def checked(self: Config, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise UnknownArgumentError(cls.__name__, name, known, hint=unsupported.get(name))
        construct(self, *args, **options)

    cls.__init__ = checked  # type: ignore[assignment]  # mypy types a class's __init__ as taking no arguments
    return cls


def strict_call(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorator: an unknown keyword of a call is an error that names the nearest known one, as of a config."""
    known = [item.name for item in signature(method).parameters.values() if item.name != "self"]

    @wraps(method)
    def checked(*args: Given.args, **options: Given.kwargs) -> Result:
        for name in options:
            if name not in known:
                raise UnknownArgumentError(method.__qualname__, name, known)
        return method(*args, **options)

    return checked


def positive(owner: str, hint: str | None = None, /, **values: int | None) -> None:
    """Raise ConfigError unless each given value is a positive integer (None passes)."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{owner}.{name} must be a positive integer, got {shown(value)}", hint=hint)
        if value is not None and value >= 2**63:
            raise ConfigError(f"{owner}.{name} must be below 2**63, got {shown(value)}", hint=hint)


def named(owner: str, **values: str) -> None:
    """Raise ConfigError unless each value is a string that says something."""
    for name, value in values.items():
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{owner}.{name} must be a name, got {shown(value)}")


def writable(option: str, path: Path | None) -> None:
    """Raise ConfigError unless this can be written, in a folder that is there already (None passes): hours later all
    that was measured would be lost.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder, and no file", hint="name a file in it")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path} is no file in a folder that exists", hint="make the folder first")
        is_new = not path.exists()
        if is_new or path.is_file():  # a pipe would wait for whoever reads it
            path.open("ab").close()
        if is_new:
            path.resolve().unlink()  # of a link what it leads to
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{option} {shown(str(path))} cannot be written: {error}", hint="name another file"
        ) from error


def is_duration(value: object) -> bool:
    """Whether this is a finite number of seconds above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
