"""Faults as edits of source text: modules with them, which nobody else sees, and the real ones back afterwards."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType

Edit = tuple[str, str, str]  # a module, what it says, what it is to say


@contextmanager
def planted_in(modules: Sequence[str], edits: Sequence[Edit]) -> Iterator[dict[str, ModuleType]]:
    """These modules made anew, each finding the ones before it, with the edits. A name is one of weft.inference,
    unless it begins with `weft.`.

    Every edit must stand in its module exactly once: one that has gone stale is an error.
    """
    full = {name: name if name.startswith("weft.") else f"weft.inference.{name}" for name in modules}
    real = {name: import_module(full[name]) for name in modules}
    assert {edit[0] for edit in edits} <= full.keys(), "an edit of a module that is not made anew"
    made: dict[str, ModuleType] = {}
    try:
        for name in modules:
            path = Path(str(real[name].__file__))
            source = path.read_text()
            for _, old, new in (edit for edit in edits if edit[0] == name):
                assert source.count(old) == 1, f"{path.name} holds {source.count(old)} times: {old!r}"
                source = source.replace(old, new)
            module = ModuleType(full[name])
            module.__file__ = str(path)
            sys.modules[full[name]] = made[name] = module
            exec(compiled(source, str(path)), module.__dict__)
        yield made
    finally:
        sys.modules |= {full[name]: module for name, module in real.items()}


@lru_cache(maxsize=256)
def compiled(source: str, path: str) -> CodeType:
    """Most modules stay as they are, fault after fault."""
    code: CodeType = compile(source, path, "exec")
    return code
