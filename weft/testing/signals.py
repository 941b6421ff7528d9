"""Signals that end a process, for work that has something to tidy up first. Knows nothing of that work."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Not everywhere is there a terminal that hangs up.
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def endings_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, so that what is open is closed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # as a shell says it

    with _handled([number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL], leave):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """None of them is heard, nor Ctrl-C, nor by the processes that are started here: for tidying up, which is short."""
    with _handled([*_ENDING, signal.SIGINT], signal.SIG_IGN):
        yield


@contextmanager
def _handled(numbers: list[int], handler: Callable[[int, Any], None] | signal.Handlers) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where Python runs no handlers, nor sets any
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
