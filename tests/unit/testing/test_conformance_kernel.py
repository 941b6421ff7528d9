"""Somebody else's kernel before the laws: the sound one is acquitted, each faulty one is convicted by its law."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.errors import ConfigError, KernelError
from weft.kernels import add_norm, silu_multiply
from weft.testing import KernelOp, run_kernel_conformance
from weft.testing.conformance.suite import ConformanceError
from weft.testing.finding import Outcome

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@triton.jit
def _scale_rows(x, stride, factors, out, width, shift, BLOCK: tl.constexpr):  # noqa: N803 (constants are in capitals)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32) * tl.load(factors + row)
    tl.store(out + row * width + column + shift, value.to(out.dtype.element_ty), mask=inside)


def scale_rows(x: Tensor, factors: Tensor, *, shift: int = 0) -> Tensor:
    """A foreign kernel: each row times its factor."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        _scale_rows[(len(x),)](x, x.stride(0), factors, out, x.shape[1], shift, BLOCK=block)
    return out


def reference(x: Tensor, factors: Tensor) -> Tensor:
    return (x * factors[:, None]).to(x.dtype)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    factors = torch.rand(shape[0], generator=generator) + 0.5
    return torch.randn(shape, generator=generator).to(dtype), factors


SOUND = KernelOp(
    kernel=scale_rows, reference=reference, inputs=inputs, shapes=[(3, 80), (1, 1), (0, 5), (40, 130)], rows=(0, 1)
)


def only_64_columns(x: Tensor, factors: Tensor) -> Tensor:
    """triton#621: the width of the tile is written down."""
    out = scale_rows(x, factors)
    out[:, 64:] = 0
    return out


def leaves_the_rest_unset(x: Tensor, factors: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[:, :64] = scale_rows(x, factors)[:, :64]
    return out


def writes_one_further(x: Tensor, factors: Tensor) -> Tensor:
    return scale_rows(x, factors, shift=1)


def takes_rows_to_be_dense(x: Tensor, factors: Tensor) -> Tensor:
    """pytorch#112577: strides are not looked at."""
    return scale_rows(torch.as_strided(x, x.shape, (x.shape[1], 1)), factors)


def works_in_place(x: Tensor, factors: Tensor) -> Tensor:
    return x.mul_(factors[:, None].to(x.dtype))


def first_factor_for_all(x: Tensor, factors: Tensor) -> Tensor:
    """A row that depends on who stands beside it."""
    return scale_rows(x, factors[:1].expand(len(x)).contiguous() if len(x) else factors)


def rounds_on_the_way(x: Tensor, factors: Tensor) -> Tensor:
    """Less precision than the reference has."""
    return scale_rows(x.half().to(x.dtype), factors)


FAULTS = {
    "results are as accurate as torchs": [only_64_columns, rounds_on_the_way, first_factor_for_all],
    "memory that nobody wrote never shows": [leaves_the_rest_unset],
    "nothing is written beside a tensor": [writes_one_further],
    "arguments are left as they are": [works_in_place],
    "a layout never changes a bit or is refused": [takes_rows_to_be_dense],
    "rows alone give the same bits": [first_factor_for_all],
}


def test_a_foreign_one_is_acquitted_by_every_law() -> None:
    assert not run_kernel_conformance(SOUND).not_judged


@pytest.mark.parametrize(("law", "fault"), [(law, fault) for law, faults in FAULTS.items() for fault in faults])
def test_a_faulty_one_is_convicted_by_its_law_and_the_case_is_shown(law: str, fault: Any) -> None:
    with pytest.raises(ConformanceError) as caught:
        run_kernel_conformance(replace(SOUND, kernel=fault))
    broken = caught.value.report.laws(Outcome.BROKEN)
    assert law in broken
    assert broken[law].startswith("given ")


def roots(x: Tensor) -> Tensor:
    return x.sqrt()


def reciprocals(x: Tensor) -> Tensor:
    return x.reciprocal()


@pytest.mark.parametrize("kernel", [roots, reciprocals])
def test_where_the_reference_is_not_finite_a_sound_one_need_not_be(kernel: Any) -> None:
    """NaN of what is below 0, and infinity of the zeros that a row is filled with but for its end."""
    op = KernelOp(kernel=kernel, reference=kernel, inputs=one_argument, shapes=[(70, 80), (1, 1), (0, 8)], rows=(0,))
    assert not run_kernel_conformance(op).not_judged

    def finite(x: Tensor) -> Tensor:
        return kernel(x).nan_to_num(0.0, 0.0, 0.0)

    with pytest.raises(ConformanceError, match="values that are not finite are not its"):
        run_kernel_conformance(replace(op, kernel=finite))

    def infinite(x: Tensor) -> Tensor:
        return torch.where(x.abs() < 2, kernel(x), torch.inf)

    with pytest.raises(ConformanceError, match="not all of it is finite where the reference is"):
        run_kernel_conformance(replace(op, kernel=infinite))


def one_argument(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    return (torch.randn(shape, generator=generator).to(dtype),)


def test_a_refused_layout_is_no_fault_and_what_cannot_be_judged_is_said() -> None:
    def dense_alone(x: Tensor, factors: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise KernelError("x is not dense")
        return scale_rows(x, factors)

    report = run_kernel_conformance(replace(SOUND, kernel=dense_alone, rows=()))
    assert list(report.not_judged) == ["rows alone give the same bits"]
    words = report.laws(Outcome.HOLDS)["a layout never changes a bit or is refused"]
    assert words == "of 8 cases 4 are refused", "rows that are alone or empty are dense in a slice too"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU bfloat16 is judged")
def test_bfloat16_alone_is_not_judged_on_a_cpu_and_that_is_no_acquittal() -> None:
    with pytest.raises(ConformanceError, match="interpreter computes bfloat16 wrongly"):
        run_kernel_conformance(replace(SOUND, dtypes=[torch.bfloat16]))


def test_an_op_that_would_judge_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no shapes"):
        replace(SOUND, shapes=[])


def gates(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    return (torch.randn(shape[0], 2 * shape[1], generator=generator).to(dtype),)


def streams(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
    x, residual = torch.randn(2, *shape, generator=generator).to(dtype)
    return x, residual, (torch.rand(shape[1], generator=generator) + 0.5).to(dtype), 1e-5


OWN = [
    KernelOp(
        kernel=silu_multiply.silu_multiply,
        reference=silu_multiply.reference,
        inputs=gates,
        shapes=[(5, 1025), (0, 8)],
        rows=(0,),
    ),
    KernelOp(
        kernel=add_norm.add_norm,
        reference=add_norm.reference,
        inputs=streams,
        shapes=[(150, 96), (3, 80), (0, 16)],
        rows=(0, 1),
    ),
]


@pytest.mark.parametrize("op", [OWN[0], pytest.param(OWN[1], marks=pytest.mark.nightly)], ids=["silu", "norm"])
def test_wefts_own_are_acquitted(op: KernelOp) -> None:
    assert not run_kernel_conformance(op).not_judged
