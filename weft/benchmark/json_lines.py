"""Files of JSON, a line each, read back: whatever is no line of its kind is named. Knows no kind.

A write that was cut off leaves a torn line: an object that begins and is not closed. It is the last one until more is
appended, which begins a line of its own (`append_line`), and from then on it stands in the middle; the loss is the same
one row, so where torn lines are passed over it does not matter where they stand. What was never an object, or is closed
and no JSON, is no cut, and an error everywhere.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, shown

logger = logging.getLogger("weft")


def read_lines(
    file: Path, reason_against: Callable[[Any], str | None], *, what: str, hint: str, may_be_torn: bool = False
) -> list[Any]:
    """The values of all lines. reason_against: why one is not of the kind, if it is not.   what: a line of it, by name.

    may_be_torn: a torn line is passed over, with a warning.
    Raises: ConfigError for a file that cannot be read, and for the first line that is something else.
    """
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} holds no {what}: {error}", hint=hint) from error
    values = []
    # Not splitlines: a text of JSON may hold other ends of lines than its own.
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else (), 1):
        try:
            value = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            if may_be_torn and _is_torn(line):
                logger.warning("%s, line %d is cut off, and passed over: %s", file, number, _beginning(line))
                continue
            raise ConfigError(f"{file}, line {number} is no {what}: {error}", hint=hint) from error
        reason = reason_against(value)
        if reason is not None:
            raise ConfigError(f"{file}, line {number} is no {what}: {reason}: {_beginning(line)}", hint=hint)
        values.append(value)
    return values


def reason_against_texts(record: Any, names: Iterable[str]) -> str | None:
    """Why this is no object in which each of these is a text, if it is not."""
    if not isinstance(record, dict):
        return "it must be an object"
    for name in names:
        if not isinstance(record.get(name), str):
            return f"{name} must be a text, got {shown(record.get(name))}"
    return None


def is_finite(value: object) -> bool:
    """Whether this is a number that a float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_torn(line: bytes) -> bool:
    """Whether an object begins here that this line does not close, whatever ends it: the half of a letter, too."""
    if not line.startswith(b"{"):
        return False
    depth, in_text, escaped = 0, False, False
    for byte in line:
        if escaped:
            escaped = False
        elif in_text:
            escaped, in_text = byte == ord("\\"), byte != ord('"')
        elif byte == ord('"'):
            in_text = True
        else:
            depth += (byte in b"{[") - (byte in b"}]")
            if not depth:
                return False
    return True


def _beginning(line: bytes) -> str:
    return line.decode(errors="backslashreplace")[:80]
