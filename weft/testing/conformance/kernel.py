"""Laws of a kernel beside a reference in plain torch: its numbers, its memory, its repeatability. Knows no kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError, KernelError
from weft.testing.conformance.accuracy import MOST, POOL, RMS, assert_by_the_rule
from weft.testing.conformance.guards import Guarded, strided
from weft.testing.conformance.suite import ConformanceReport, given, require, try_laws
from weft.testing.finding import NotJudged

Inputs = tuple[Any, ...]

# Rounds of all shapes, to make a pool of results large enough to be judged by its mean.
_MOST_ROUNDS = 40
_ROUNDS_OF_BITS = 2


@dataclass(frozen=True, kw_only=True)
class KernelOp:
    """A kernel, and all that has to be known to judge it.

    kernel, reference: from the same arguments to a tensor or a tuple of tensors; the reference in plain torch, in any
    floating dtype, float64 too.   inputs: from a shape, a dtype and a generator to the arguments, on the CPU.
    shapes: odd ones, edges of tiles and empty ones among them.   dtypes: all that it takes.
    rows: the arguments whose first axis is that of the results' rows, which nothing may carry from one to another;
    empty if it is no kernel over rows.
    """

    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[tuple[int, ...], torch.dtype, torch.Generator], Inputs]
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)
    rows: Sequence[int] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("shapes", "dtypes"):
            if not getattr(self, field):
                raise ConfigError(f"KernelOp has no {field}: nothing would be judged")


def run_kernel_conformance(op: KernelOp) -> ConformanceReport:
    """Judge a kernel, on the GPU if there is one, else on the CPU (a Triton kernel in its interpreter).

    On a CPU bfloat16 is not judged: the interpreter computes it wrongly.
    Returns: every law with its outcome. Raises: ConformanceError, an AssertionError that names each broken law and the
    shape and dtype that broke it.
    """
    require(op, isinstance(op, KernelOp), "a KernelOp, which holds the kernel, its reference and its inputs")
    name = op.name or getattr(op.kernel, "__name__", repr(op.kernel))
    with torch.no_grad():
        return try_laws("kernel", name, op, LAWS)


def results_have_the_references_shapes_and_dtypes(op: KernelOp) -> str:
    for shape, dtype, arguments in _cases(op):
        with given(f"shape {shape} in {dtype}"):
            expected, found = _many(op.reference(*arguments)), _run(op, arguments)
            assert len(found) == len(expected), f"{len(found)} results, not {len(expected)}"
            for place, (one, other) in enumerate(zip(found, expected, strict=True)):
                ours, theirs = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (one, other))
                assert ours == theirs, f"result {place} is {ours}, not {theirs}"
    return f"{len(op.shapes)} shapes"


def results_are_as_accurate_as_torchs(op: KernelOp) -> str:
    """Errors against float64, in pools of many values; and with all of a row 0 but its end, which a tile may miss."""
    judged = []
    for dtype in _dtypes(op):
        for ends_only in (False, True):
            pools = _pools(op, dtype, ends_only)
            for place, pool in enumerate(pools):
                what = "rows that are 0 but for their last 8" if ends_only else "rows of random numbers"
                with given(f"{what} in {dtype}, result {place} of shapes {list(op.shapes)}"):
                    found, torchs, exact = _where_finite(*(torch.cat(part) for part in zip(*pool, strict=True)))
                    if exact.numel() < POOL:
                        if ends_only:
                            continue  # an op that is not finite at 0 has been judged by random numbers
                        raise NotJudged(f"{exact.numel()} finite values of {dtype} are no pool: add shapes")
                    assert_by_the_rule(found, torchs, exact)
        judged.append(str(dtype).removeprefix("torch."))
    return f"in {', '.join(judged)}: RMS within {RMS} and the largest within {MOST:g} of torch's own"


def memory_that_nobody_wrote_never_shows(op: KernelOp) -> str:
    """What the kernel allocates is NaN before it writes, and so is what lies beside what it is given."""
    for shape, dtype, arguments in _cases(op):
        for name, layout in (("dense", lambda tensor: tensor), ("in slices of wider rows of NaN", strided)):
            with given(f"shape {shape} in {dtype}, {name}"):
                try:
                    found = _run(op, tuple(layout(one) if _is_rows(one) else one for one in arguments))
                except (KernelError, ValueError):
                    if name == "dense":
                        raise
                    continue  # it says that it takes no such layout
                for one, expected in zip(found, _many(op.reference(*arguments)), strict=True):
                    assert (one.isfinite() | ~expected.isfinite()).all(), "what nobody wrote shows in it"
    return "neither in what it returns nor beside what it is given"


def nothing_is_written_beside_a_tensor(op: KernelOp) -> str:
    for shape, dtype, arguments in _cases(op):
        guard = Guarded()
        with given(f"shape {shape} in {dtype}"):
            placed = [
                guard.place(_there(one), f"argument {place}") if _is_float(one) else one
                for place, one in enumerate(arguments)
            ]
            with guard:
                op.kernel(*placed)
            guard.check()
    return "bands of 256 values around all that it is given and allocates"


def arguments_are_left_as_they_are(op: KernelOp) -> str:
    for shape, dtype, arguments in _cases(op):
        here = tuple(_there(one) for one in arguments)
        before = [one.clone() if isinstance(one, Tensor) else one for one in here]
        op.kernel(*here)
        for place, (old, new) in enumerate(zip(before, here, strict=True)):
            if isinstance(old, Tensor):
                words = f"given shape {shape} in {dtype}: argument {place} is changed"
                assert torch.equal(old, new), words
    return "to the bit"


def a_layout_never_changes_a_bit_or_is_refused(op: KernelOp) -> str:
    """pytorch#112577: rows of a slice, as of a packed projection."""
    refused = 0
    for shape, dtype, arguments in _cases(op):
        with given(f"shape {shape} in {dtype}, dense and in slices of wider rows"):
            dense = _run(op, arguments)
            try:
                sliced = _run(op, tuple(strided(one) if _is_rows(one) else one for one in arguments))
            except (KernelError, ValueError):
                refused += 1
                continue
            _assert_same(dense, sliced)
    return f"of {len(op.shapes) * len(_dtypes(op))} cases {refused} are refused"


def a_run_again_gives_the_same_bits(op: KernelOp) -> str:
    for shape, dtype, arguments in _cases(op):
        with given(f"shape {shape} in {dtype}, twice"):
            _assert_same(_run(op, arguments), _run(op, arguments))
    return "twice"


def rows_alone_give_the_same_bits(op: KernelOp) -> str:
    if not op.rows:
        raise NotJudged("the op names no arguments that hold rows (`rows`)")
    for shape, dtype, arguments in _cases(op):
        together = _run(op, arguments)
        for row in range(min(len(arguments[op.rows[0]]), 4)):
            single = tuple(one[row : row + 1] if place in op.rows else one for place, one in enumerate(arguments))
            with given(f"shape {shape} in {dtype}, row {row} alone and beside the others"):
                _assert_same([one[row : row + 1] for one in together], _run(op, single))
    return "each row alone and beside others"


LAWS: tuple[Callable[[KernelOp], str], ...] = (
    results_have_the_references_shapes_and_dtypes,
    results_are_as_accurate_as_torchs,
    memory_that_nobody_wrote_never_shows,
    nothing_is_written_beside_a_tensor,
    arguments_are_left_as_they_are,
    a_layout_never_changes_a_bit_or_is_refused,
    a_run_again_gives_the_same_bits,
    rows_alone_give_the_same_bits,
)


def _dtypes(op: KernelOp) -> list[torch.dtype]:
    """Those that can be judged here. Raises: NotJudged if there is none."""
    on_gpu = torch.cuda.is_available()
    dtypes = [dtype for dtype in op.dtypes if on_gpu or dtype != torch.bfloat16]
    if not dtypes:
        raise NotJudged("Triton's interpreter computes bfloat16 wrongly, and there is no GPU")
    return dtypes


def _cases(op: KernelOp) -> list[tuple[tuple[int, ...], torch.dtype, Inputs]]:
    return [
        (shape, dtype, op.inputs(shape, dtype, torch.Generator().manual_seed(place)))
        for dtype in _dtypes(op)
        for place, shape in enumerate(op.shapes)
    ]


def _pools(op: KernelOp, dtype: torch.dtype, ends_only: bool) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """For each result, pieces of what the kernel, torch in the same dtype and torch in float64 say, flat."""
    pools: list[list[tuple[Tensor, Tensor, Tensor]]] = []
    for seed in range(_MOST_ROUNDS):
        for shape in op.shapes:
            arguments = op.inputs(shape, dtype, torch.Generator().manual_seed(1000 + seed))
            if ends_only:
                arguments = tuple(_end_of(one) if _is_rows(one) else one for one in arguments)
            wide = tuple(one.double() if _is_float(one) else one for one in arguments)
            parts = zip(_run(op, arguments), _many(op.reference(*arguments)), _many(op.reference(*wide)), strict=True)
            for place, part in enumerate(parts):
                if place == len(pools):
                    pools.append([])
                pools[place].append(tuple(tensor.cpu().flatten() for tensor in part))  # type: ignore[arg-type]
        if all(sum(int(torchs.isfinite().sum()) for _, torchs, _ in pool) >= POOL for pool in pools):
            break
    return pools


def _where_finite(found: Tensor, torchs: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values of which the reference has finite ones, to be judged by their errors; all others have to be as its.

    Or as the exact result rounded: where the reference overflows on its way, a kernel may do better.
    """
    finite = torchs.isfinite()
    assert found[finite].isfinite().all(), "not all of it is finite where the reference is"
    same = (found == torchs) | (found.isnan() & torchs.isnan()) | (found == exact.to(found.dtype))
    different = int((~same[~finite]).sum())
    assert different == 0, f"{different} of {len(same) - int(finite.sum())} values that are not finite are not its"
    return found[finite], torchs[finite], exact[finite]


def _end_of(tensor: Tensor) -> Tensor:
    """triton#621: where a tile ends before the row does."""
    ended = torch.zeros_like(tensor)
    ended[..., -8:] = tensor[..., -8:]
    return ended


def _run(op: KernelOp, arguments: Inputs) -> list[Tensor]:
    with Guarded():
        return [result.cpu() for result in _many(op.kernel(*(_there(one) for one in arguments)))]


def _there(value: Any) -> Any:
    return value.cuda() if isinstance(value, Tensor) and torch.cuda.is_available() else value


def _many(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_rows(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1


def _assert_same(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        different = int(((one != other) & ~(one.isnan() & other.isnan())).sum())
        assert different == 0, f"result {place}: {different} of {one.numel()} values differ"
