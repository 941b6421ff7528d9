"""Files of JSON, a line each, read back: whatever is no line of its kind is named. Knows no kind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.errors import ConfigError


def read_lines(file: Path, is_right: Callable[[Any], bool], *, what: str, hint: str) -> list[Any]:
    """The values of all lines. is_right: whether one is of the kind.   what: a line of it, by name.

    Raises: ConfigError for a file that cannot be read, and for the first line that is something else.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} holds no {what}: {error}", hint=hint) from error
    values = []
    # Not splitlines: a text of JSON may hold other ends of lines than its own.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number} is no {what}: {error}", hint=hint) from error
        if not is_right(values[-1]):
            raise ConfigError(f"{file}, line {number} is no {what}: {line[:80]}", hint=hint)
    return values
