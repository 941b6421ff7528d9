"""Values of a `config.json`: what each may be, and reading one. Knows no field by name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from weft.errors import CheckpointError


class Kind(NamedTuple):
    """What a value of a `config.json` must be: in words, and as a test."""

    words: str
    accepts: Callable[[Any], bool]


# By type(), not isinstance(): a bool is an int. Numbers fit float32, which tables are computed in; NaN compares false.
_LARGEST = torch.finfo(torch.float32).max
BOOLEAN = Kind("true or false", lambda value: type(value) is bool)
INTEGER = Kind("an integer", lambda value: type(value) is int)
POSITIVE_INTEGER = Kind("a positive integer", lambda value: type(value) is int and value > 0)
POSITIVE = Kind("a positive finite number", lambda value: type(value) in (int, float) and 0 < value <= _LARGEST)
NOT_NEGATIVE = Kind(
    "a finite number, not negative", lambda value: type(value) in (int, float) and 0 <= value <= _LARGEST
)
POSITIVES = Kind(
    "a list of positive finite numbers", lambda value: isinstance(value, list) and all(map(POSITIVE.accepts, value))
)
MAPPING = Kind("a mapping", lambda value: isinstance(value, Mapping))


def read_field(config: Mapping[str, Any], name: str, kind: Kind, *default: Any) -> Any:
    """A value of a `config.json`; a default, if given, is for one that is absent or null.

    Raises: CheckpointError that names a value not of its kind, KeyError for an absent one without a default.
    """
    value = default[0] if default and config.get(name) is None else config[name]
    if kind.accepts(value) or (default and value is None):
        return value
    raise CheckpointError(f"config.json: {name}={value!r} must be {kind.words}")
