"""Kernels that start before the one ahead has ended, behind one that lets them start at once and takes its time.

The slow kernel copies at its end: who does not wait reads what was there before, or writes over what is yet to be read.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.kernels._jit import jit, launches_early, tl
from weft.kernels.add_norm import add_norm
from weft.kernels.few_rows_gemm import few_rows_gemm
from weft.kernels.gemv import Norm, gemv
from weft.kernels.paged import HeadRotation, NewTokens, PagedKeys, Scoring
from weft.kernels.paged_decode import paged_decode
from weft.kernels.sample import sample
from weft.kernels.silu_multiply import silu_multiply
from weft.kernels.truncate import thresholds

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 4, 1024
DELAY_NS = 100_000  # a kernel that does not wait has ended long before

Consumer = Callable[[Tensor], Tensor]


@jit
def _copy_slowly(source, target, size, delay, block: tl.constexpr):
    """Lets the next kernel start, then stands still, then copies."""
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - start < delay:
        pass
    place = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + place, tl.load(source + place, mask=place < size), mask=place < size)


@jit
def _add_one_at_once(source, target, size, block: tl.constexpr):
    """The planted fault: is launched early and does not wait."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + place, tl.load(source + place, mask=place < size) + 1, mask=place < size)


def copy_slowly(source: Tensor, target: Tensor) -> None:
    _copy_slowly[(1,)](source, target, source.numel(), DELAY_NS, block=16384, num_warps=8)


def consumers(device: torch.device) -> dict[str, Consumer]:
    """Each takes `[ROWS, COLUMNS]`, or as much of it as it wants, and leaves parameters alone."""
    dtype = torch.bfloat16
    square = torch.randn(COLUMNS, COLUMNS, device=device, dtype=dtype) * COLUMNS**-0.5
    weight = torch.rand(COLUMNS, device=device, dtype=dtype) + 0.5
    norm = Norm(weight=weight, epsilon=1e-5)
    zeros = torch.zeros(ROWS, dtype=torch.int64, device=device)
    greedy = torch.zeros(ROWS, device=device)
    torch.cuda.synchronize()
    return {
        "gemv, one row": lambda x: gemv(x[:1], square, norm=norm, residual=x[:1]),
        "gemv, rows": lambda x: gemv(x, square, norm=norm, swiglu=True),
        "few_rows_gemm": lambda x: few_rows_gemm(x, square),
        "few_rows_gemm and add_norm": lambda x: add_norm(few_rows_gemm(x, square, splits=4), x, weight, 1e-5)[1],
        "add_norm": lambda x: add_norm(x, x, weight, 1e-5)[1],
        "silu_multiply": silu_multiply,
        "sample": lambda x: sample(x, greedy, zeros, zeros),
        "truncate": lambda x: thresholds(x, greedy + 1, zeros + 5, greedy + 0.5, greedy),
        **decodes(device),
    }


def decodes(device: torch.device) -> dict[str, Consumer]:
    """Paged decode of packed rows, with a program a head, with several and a merge, and with a launch for long ones."""
    heads, kv_heads, head_dim, length = 4, 2, 128, 1000
    pool = torch.randn(2, 1, ROWS * 16, 64, kv_heads, head_dim, device=device, dtype=torch.bfloat16)
    tables = torch.arange(ROWS * 16, device=device).view(ROWS, 16)
    lengths = torch.full((ROWS,), length, dtype=torch.int64, device=device)
    paged = PagedKeys(
        pool=pool,
        layer=0,
        block_tables=tables,
        sequence_lengths=lengths,
        query_starts=torch.arange(ROWS + 1, device=device),
    )
    angles = torch.randn(length, head_dim // 2, device=device, dtype=torch.bfloat16)
    new = NewTokens(
        positions=lengths - 1,
        slots=tables[:, -1] * 64 + (length - 1) % 64,
        rotation=HeadRotation(cos=angles.cos(), sin=angles.sin()),
    )
    scoring = Scoring(scale=head_dim**-0.5)
    width = (heads + 2 * kv_heads) * head_dim
    forms: dict[str, dict[str, Any]] = {
        "paged decode, whole": {"programs": 1},
        "paged decode, shared": {"programs": 64},
        "paged decode, lent": {"programs": 64, "lend": True},
    }
    torch.cuda.synchronize()
    return {
        name: partial(_decode, paged=paged, scoring=scoring, new=new, num_query_heads=heads, width=width, **options)
        for name, options in forms.items()
    }


def _decode(x: Tensor, *, paged: PagedKeys, scoring: Scoring, width: int, **options: Any) -> Tensor:
    return paged_decode(x[:, :width], paged, scoring, **options)


NAMES = (
    "gemv, one row",
    "gemv, rows",
    "few_rows_gemm",
    "few_rows_gemm and add_norm",
    "add_norm",
    "silu_multiply",
    "sample",
    "truncate",
    "paged decode, whole",
    "paged decode, shared",
    "paged decode, lent",
)


@pytest.fixture
def early(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that can, and no kernel between two others that fills unset memory with NaN."""
    if not launches_early(device):
        pytest.skip("this GPU does not launch a kernel before the one ahead has ended")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    return device


def replayed(work: Callable[[], None], stale: Tensor | None = None) -> None:
    """Capture, then run it three times, each with a stale value in its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile before the capture
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    torch.cuda.synchronize()
    for _ in range(3):
        if stale is not None:
            stale.fill_(-7.0)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()


def read_behind_a_slow_kernel(consume: Consumer, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a consumer makes of a slow kernel's result in one graph, and of the same values alone."""
    source = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    expected = consume(source)
    torch.cuda.synchronize()
    kept: list[Tensor] = []

    def work() -> None:
        copy_slowly(source, target)
        kept[:] = [consume(target)]

    replayed(work, target)
    return kept[0], expected


def written_behind_a_slow_kernel(consume: Consumer, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a slow kernel read from memory that is freed and then given to the consumer's result; what it should be."""
    given = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    size = consume(given).nbytes // given.element_size()
    values = torch.randn(size, device=device, dtype=torch.bfloat16)
    seen = torch.zeros_like(values)
    torch.cuda.synchronize()

    def work() -> None:
        freed = values.clone()
        copy_slowly(freed, seen)
        del freed
        consume(given)

    replayed(work, seen)
    return seen, values


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_before_the_kernel_ahead_has_written_it(name: str, early: torch.device) -> None:
    found, expected = read_behind_a_slow_kernel(consumers(early)[name], early)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_written_before_the_kernel_ahead_has_read_it(name: str, early: torch.device) -> None:
    found, expected = written_behind_a_slow_kernel(consumers(early)[name], early)
    assert torch.equal(found, expected)


def test_who_does_not_wait_is_convicted(early: torch.device) -> None:
    def consume(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _add_one_at_once[(1,)](x, out, x.numel(), block=16384, num_warps=8, launch_pdl=True)
        return out

    for attempt in (read_behind_a_slow_kernel, written_behind_a_slow_kernel):
        found, expected = attempt(consume, early)
        assert not torch.equal(found, expected)


def test_a_chain_in_one_graph_gives_the_bits_of_one_kernel_at_a_time(early: torch.device) -> None:
    made = consumers(early)
    x = torch.randn(ROWS, COLUMNS, device=early, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    order = ["few_rows_gemm and add_norm", "few_rows_gemm", "add_norm"] * 8
    serial = x
    for name in order:
        serial = made[name](serial)
        torch.cuda.synchronize()
    kept: list[Tensor] = []

    def work() -> None:
        found = x
        for name in order:
            found = made[name](found)
        kept[:] = [found, made["sample"](found), made["gemv, one row"](found)]

    replayed(work)
    torch.cuda.synchronize()
    for found, expected in zip(kept, (serial, made["sample"](serial), made["gemv, one row"](serial)), strict=True):
        assert torch.equal(found, expected)
