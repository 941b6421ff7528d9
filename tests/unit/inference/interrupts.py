"""Ctrl-C at a line of one's choice."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def interrupted_at(line: int, work: Callable[[], object], *, counts: Callable[[CodeType], bool]) -> bool:
    """Run it up to the line of this number, of those in code that counts; False if it has not so many."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not counts(frame.f_code):
            return None
        left -= event == "line"
        if left == 0:
            sys.settrace(before)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
