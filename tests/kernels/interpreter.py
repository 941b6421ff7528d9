"""Triton's interpreter, without what it does again and again: half of the time that a kernel takes there.

Its products are taken row by row: those of a whole tile are a library's, and whether a row's place shows in their bits
hangs on the CPU, where a GPU's give each row the same.

It puts functions of its own in the place of Triton's for a launch, and looks for them at every call inside a kernel
too, of `tl.max` for one, where all of it is replaced; and it makes a table of types for each type it looks up.
"""

from functools import cache
from types import ModuleType
from typing import Any, Protocol

import numpy


class Replaced(Protocol):
    """What Triton keeps of one replacement, to take it back."""

    def restore(self) -> None: ...


class _Launch:
    """What was replaced during a launch, in which modules. Its end takes everything back, the last first."""

    def __init__(self) -> None:
        self.modules: set[ModuleType] = set()
        self.replaced: list[Replaced] = []

    def restore(self) -> None:
        self.modules.clear()
        while self.replaced:
            self.replaced.pop().restore()


def hasten(interpreter: Any) -> None:
    """Change the module `triton.runtime.interpreter`; what a kernel computes stays as it was."""
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang, {interpreter.tl, interpreter.tl.core})
    interpreter._get_np_dtype = _once_a_type(interpreter._get_np_dtype)


def multiply_by_rows(interpreter: Any) -> None:
    """Change the same module: no bit of a product's row hangs on its place among others."""
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _row_by_row(builder.create_dot, interpreter.TensorHandle)


def _once_a_launch(replace: Any, modules: set[ModuleType]) -> Any:
    """A launch asks first, and restores what it is given. Calls inside it ask too, and restore nothing."""
    launch = _Launch()

    @cache
    def seen_by(function: Any) -> frozenset[ModuleType]:
        return frozenset(value for value in function.__globals__.values() if isinstance(value, ModuleType)) & modules

    def replace_once(function: Any) -> Replaced:
        if not seen_by(function) <= launch.modules:
            launch.modules |= seen_by(function)
            launch.replaced.append(replace(function))
        return launch

    return replace_once


def _row_by_row(create_dot: Any, handle: Any) -> Any:
    """Of matrices in numbers that NumPy has; the rest is left to Triton."""

    def dot(builder: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if a.data.ndim != 2 or not (a.data.dtype.kind == b.data.dtype.kind == "f"):
            return create_dot(builder, a, b, d, *how)
        rows = [numpy.matmul(row, b.data, dtype=d.data.dtype) for row in a.data]
        return handle(numpy.stack(rows) + d.data, d.dtype.scalar)

    return dot


def _once_a_type(look_up: Any) -> Any:
    """By a type's name, which tells pointers and blocks of everything apart; not all of them can be hashed."""
    known: dict[str, Any] = {}

    def look_up_once(of: Any) -> Any:
        if of.name not in known:
            known[of.name] = look_up(of)
        return known[of.name]

    return look_up_once
