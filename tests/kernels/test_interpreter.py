from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tests.kernels.interpreter import hasten, multiply_by_rows
from weft.kernels._jit import interpreting, jit, tl


@jit
def _largest(values):
    return tl.max(values, 0)


@jit
def _kernel(x, y, SIZE: tl.constexpr):  # noqa: N803
    for start in range(3):
        tl.store(y + start, _largest(tl.load(x + start * SIZE + tl.arange(0, SIZE))))


def of_triton() -> set[str]:
    owners = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    return {f"{owner.__name__}.{name}" for owner in owners for name in dir(owner) if is_builtin(owner, name)}


def is_builtin(owner: Any, name: str) -> bool:
    return bool(tl.core.is_builtin(getattr(owner, name)))


@pytest.mark.skipif(not interpreting(), reason="where kernels are compiled nothing of Triton's is replaced")
def test_a_launch_leaves_nothing_replaced() -> None:
    before, found = of_triton(), torch.zeros(3)
    assert {"triton.language.load", "triton.language.core.load"} <= before
    for _ in range(2):
        _kernel[(2,)](torch.arange(24.0), found, SIZE=8)
        assert found.tolist() == [7.0, 15.0, 23.0]
        assert of_triton() == before


def test_a_row_of_a_product_is_multiplied_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose products show a row's place, as OpenBLAS's do on some CPUs, has no place to show."""
    plain = numpy.matmul

    def showing(a: Any, b: Any, **how: Any) -> Any:
        found = plain(a, b, **how)
        return found if a.ndim == 1 else found + numpy.arange(len(a), dtype=found.dtype)[:, None]

    def handle(data: Any, dtype: Any = None) -> SimpleNamespace:
        return SimpleNamespace(data=data, dtype=SimpleNamespace(scalar=dtype))

    interpreter = SimpleNamespace(InterpreterBuilder=SimpleNamespace(create_dot=None), TensorHandle=handle)
    multiply_by_rows(interpreter)
    monkeypatch.setattr(numpy, "matmul", showing)
    a, b, d = (numpy.ones(shape, dtype=numpy.float32) for shape in ((4, 3), (3, 2), (4, 2)))
    found = interpreter.InterpreterBuilder.create_dot(None, handle(a), handle(b), handle(d), None, 0)
    assert found.data.tolist() == [[4.0, 4.0]] * 4


def test_calls_inside_a_launch_replace_nothing_again_and_every_launch_does() -> None:
    language = ModuleType("language")
    language.core = ModuleType("core")  # type: ignore[attr-defined]
    events: list[str] = []

    def replace(function: FunctionType) -> SimpleNamespace:
        events.append(function.__name__)
        return SimpleNamespace(restore=lambda: events.append(f"not {function.__name__}"))

    interpreter = SimpleNamespace(tl=language, _patch_lang=replace, _get_np_dtype=None)
    hasten(interpreter)
    # A kernel sees the language, what the language itself is written in sees its core alone.
    kernel = FunctionType((lambda: None).__code__, {"tl": language}, "kernel")
    inner = FunctionType((lambda: None).__code__, {"tl": language}, "inner")
    library = FunctionType((lambda: None).__code__, {"core": language.core}, "library")
    for _ in range(2):
        launch = interpreter._patch_lang(kernel)
        for function in (inner, library, library, inner):
            interpreter._patch_lang(function)
        launch.restore()
    assert events == ["kernel", "library", "not library", "not kernel"] * 2


def test_a_type_is_looked_up_once_and_told_from_others() -> None:
    asked: list[str] = []

    def look_up(of: SimpleNamespace) -> str:
        asked.append(of.name)
        return str(of.name)

    interpreter = SimpleNamespace(tl=ModuleType("language"), _patch_lang=None, _get_np_dtype=look_up)
    interpreter.tl.core = ModuleType("core")
    hasten(interpreter)
    types = [SimpleNamespace(name=name) for name in ("fp32", "pointer<fp32>", "<[8], fp32>", "fp32")]
    assert [interpreter._get_np_dtype(of) for of in types] == [of.name for of in types]
    assert asked == ["fp32", "pointer<fp32>", "<[8], fp32>"]
