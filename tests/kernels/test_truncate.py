"""The kernels' thresholds are the plain version's, to the bit, whatever the rows and whoever lies beside them."""

from collections.abc import Callable

import pytest
import torch

from tests.kernels.conftest import Accesses
from weft.errors import KernelError
from weft.kernels import _truncate_kernels as kernels
from weft.kernels import _truncate_reference as plain
from weft.kernels._jit import interpreting, jit, tl
from weft.kernels.truncate import BLOCK, reference, thresholds

Settings = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def settings(count: int, vocab_size: int) -> Settings:
    """Every one of them among others, and the ends of their ranges."""

    def pick(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (count,))]

    return (
        pick([0.0, 1e-40, 0.05, 0.3, 0.8, 1.0, 1.0, 2.5, 1e10], torch.float32),
        pick([0, 0, 0, 1, 2, 50, 300, vocab_size - 1, vocab_size, 2**62], torch.int64).clamp(min=0),
        pick([1.0, 1.0, 0.99999994, 0.999, 0.9, 0.5, 1e-12], torch.float32),
        pick([0.0, 0.0, 0.0, 0.05, 1e-4, 1.0, 1e-44], torch.float32),
    )


def check(logits: torch.Tensor, given: Settings, device: torch.device) -> torch.Tensor:
    expected = reference(logits, *given)
    found = thresholds(logits.to(device), *(column.to(device) for column in given)).cpu()
    wrong = [(row, *(float(column[row]) for column in given)) for row in (found != expected).nonzero()[:, 0].tolist()]
    assert not wrong, (wrong, found, expected)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 131, BLOCK, 2 * BLOCK + 1])
def test_random_rows_are_cut_where_plain_torch_cuts_them(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    count = 24
    scale = torch.tensor([0.01, 1.0, 3.0, 10.0])[torch.randint(4, (count, 1))]
    check((torch.randn(count, vocab_size) * scale).to(dtype), settings(count, vocab_size), device)


def hard_rows(vocab_size: int) -> torch.Tensor:
    """Equals, one token, both zeros, -inf, tiny and huge numbers, and neighbours in the last bit."""
    rows = torch.zeros(10, vocab_size)
    rows[1, vocab_size // 2] = 100.0
    rows[2] = torch.where(torch.rand(vocab_size) < 0.5, -0.0, 0.0)
    rows[3] = torch.where(torch.rand(vocab_size) < 0.9, -torch.inf, torch.randn(vocab_size))
    rows[4] = -torch.inf
    rows[4, -1] = -7.0
    rows[5] = torch.randn(vocab_size) * 1e-40
    rows[6] = torch.randn(vocab_size).clamp(-3, 3) * 1e38
    rows[7] = (torch.randn(vocab_size) * 2).round()
    rows[8] = (torch.full((vocab_size,), 20.0).view(torch.int32) - torch.arange(vocab_size, dtype=torch.int32)).view(
        torch.float32
    )
    rows[9] = -(torch.rand(vocab_size) * 1e-3 + 5)
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "one",
    [(0.8, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 700, 0.5, 1e-3), (1e10, 0, 0.3, 0.0), (1e-40, 3000, 0.999, 0.2)],
    ids=str,
)
def test_hard_rows_are_cut_where_plain_torch_cuts_them(
    one: tuple[float, int, float, float], dtype: torch.dtype, device: torch.device
) -> None:
    logits = hard_rows(BLOCK + 900)
    if dtype == torch.float16:
        logits = logits.clamp(min=-6e4, max=6e4)
    count = len(logits)
    given = tuple(
        torch.full((count,), value, dtype=torch.int64 if place == 1 else torch.float32)
        for place, value in enumerate(one)
    )
    check(logits.to(dtype), given, device)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999, 0.999999])
def test_many_small_ones_count_as_much_as_they_weigh(top_p: float, device: torch.device) -> None:
    """Below one token lie steps of others, near where all of them together begin to matter."""
    vocab_size = BLOCK + 300
    octaves = torch.arange(1, 33)
    logits = (-octaves[:, None] - torch.arange(vocab_size) % 7 * 0.25) * 0.6931471805599453
    logits[:, 77] = 0.0
    count = len(octaves)
    given = torch.ones(count), torch.zeros(count, dtype=torch.int64), torch.full((count,), top_p), torch.zeros(count)
    found = check(logits, given, device)
    assert len(found.unique()) > 5


def test_so_many_of_the_smallest_mass_that_the_cut_lies_among_them(device: torch.device) -> None:
    logits = torch.full((1, 70_000), -40.2 * 0.6931471805599453)
    logits[0, 5] = 0.0
    given = torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.full((1,), 0.99999994), torch.zeros(1)
    assert check(logits, given, device) < 0


@pytest.mark.parametrize("top_k", [1, 40, 2000])
def test_both_zeros_are_one_number(top_k: int, device: torch.device) -> None:
    """The highest of a group may be either, so none may be taken for lower than the other."""
    count = 5
    logits = torch.where(torch.rand(count, BLOCK + 60) < torch.rand(count, 1), 0.0, -0.0)
    ranks = torch.full((count,), top_k)
    for top_p in (1.0, 0.4):
        found = check(logits, (torch.ones(count), ranks, torch.full((count,), top_p), torch.zeros(count)), device)
        assert (found == 0).all()


def test_a_row_is_cut_alike_in_any_batch_and_any_memory(device: torch.device) -> None:
    """Alone, in another order, between NaN, and in rows that lie apart."""
    count, vocab_size = 12, BLOCK + 77
    logits, given = torch.randn(count, vocab_size) * 3, settings(count, vocab_size)
    found = check(logits, given, device)
    order = torch.randperm(count)
    moved: Settings = tuple(column[order] for column in given)  # type: ignore[assignment]
    wide = torch.full((count, vocab_size + 13), torch.nan, device=device)
    wide[:, 7 : vocab_size + 7] = logits[order].to(device)
    again = thresholds(wide[:, 7 : vocab_size + 7], *(column.to(device) for column in moved)).cpu()
    assert torch.equal(again, found[order])
    for row in range(3):
        alone = thresholds(*(tensor[row : row + 1].to(device) for tensor in (logits, *given))).cpu()
        assert torch.equal(alone, found[row : row + 1])


def test_broken_rows_have_no_threshold_and_disturb_no_other(device: torch.device) -> None:
    logits = torch.randn(8, BLOCK + 5)
    given = settings(8, BLOCK + 5)
    given[0][:] = 1.0
    given[1][:], given[2][:], given[3][:] = 20, 0.9, 0.01
    whole = check(logits, given, device)
    logits[0, 3], logits[2, -1], logits[4], logits[6, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
    found = check(logits, given, device)
    assert torch.isinf(found[::2]).all()
    assert torch.equal(found[1::2], whole[1::2])


@pytest.mark.skipif(not interpreting(), reason="only the interpreter says what a kernel touched")
def test_only_what_may_matter_is_read_and_only_its_own_is_written(
    accesses: Callable[[], Accesses],
    fenced: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that cut nothing are not looked at; the second pass of top_k reads only blocks that reach its digit."""
    vocab_size = 3 * BLOCK
    logits = torch.randn(4, vocab_size).clamp(max=2.0)
    logits[1, BLOCK + 3] = 50.0
    logits = fenced(logits)
    whole = torch.zeros(4, dtype=torch.int64)
    whole[0], whole[1] = 5, 1
    temperatures, top_p, min_p = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0.5, 0.9, 1.0, 1.0]), torch.zeros(4)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **given: fenced(empty(*shape, **given)))  # the result's too
    seen = accesses()
    found = thresholds(logits, temperatures, whole, top_p, min_p)
    assert found.tolist() == [-torch.inf, 50.0, -torch.inf, -torch.inf]
    assert seen.elements(logits, "loads") == set(range(vocab_size, 2 * vocab_size))
    assert not seen.elements(logits, "stores")
    assert seen.elements(found, "stores") == {0, 1, 2, 3}
    first = logits.data_ptr() + 4 * vocab_size
    reads = sum(int(((one >= first) & (one < first + 4 * BLOCK)).sum()) for one in seen.loads)
    assert reads == BLOCK  # once, by the pass that finds the highest


@jit
def _numbers_kernel(values, masses, numbers, logarithms, highest, temperature, terms: tl.constexpr, size: tl.constexpr):
    place = tl.program_id(0) * size + tl.arange(0, size)
    found = kernels._mass(kernels._octaves(tl.load(values + place), tl.load(highest), tl.load(temperature)))
    tl.store(masses + place, found)
    tl.store(logarithms + place, kernels._logarithm(tl.load(numbers + place).to(tl.float64), terms))


@pytest.mark.parametrize("temperature", [1e-40, 0.7, 1.0, 3.3, 1e10])
def test_masses_and_logarithms_are_plain_torchs_to_the_bit(temperature: float, device: torch.device) -> None:
    size = 1 << 14
    values = torch.randn(size) * 12
    values[:3] = torch.tensor([-torch.inf, -3.4e38, 60.0])
    numbers = torch.rand(size).clamp(min=1e-44)
    highest, warm = torch.tensor(60.0), torch.tensor(temperature)
    masses = torch.empty(size, dtype=torch.int64, device=device)
    logarithms = torch.empty(size, dtype=torch.float64, device=device)
    tensors = [tensor.to(device) for tensor in (values, numbers, highest, warm)]
    _numbers_kernel[(size // 1024,)](
        tensors[0],
        masses,
        tensors[1],
        logarithms,
        tensors[2],
        tensors[3],
        terms=plain.LOGARITHM_TERMS,
        size=1024,
        enable_fp_fusion=False,
    )
    assert torch.equal(masses.cpu(), plain.mass(values, highest, warm))
    assert torch.equal(logarithms.cpu(), plain.logarithm(numbers.double()))


def test_bad_input_is_refused_by_name(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, one, zero = torch.zeros(2, 9, device=device), torch.ones(2, device=device), torch.zeros(2, device=device)
    whole = torch.zeros(2, dtype=torch.int64, device=device)

    def refused(message: str, *arguments: torch.Tensor) -> None:
        with pytest.raises(KernelError, match=message):
            thresholds(*arguments)

    refused("logits must be", logits.T, one, whole, one, zero)
    refused("logits must be", logits[:, :0], one, whole, one, zero)
    refused("torch.int64 of shape", logits.long(), one, whole, one, zero)
    refused("logits is torch.float64", logits.double(), one, whole, one, zero)
    refused("temperatures is torch.float64", logits, one.double(), whole, one, zero)
    refused("top_k is torch.int32", logits, one, whole.int(), one, zero)
    refused(r"top_p is torch.float32 \(1,\)", logits, one, whole, one[:1], zero)
    refused("min_p is torch.float32", logits, one, whole, one, torch.zeros(4, device=device)[::2])
    refused("min_p lies on meta", logits, one, whole, one, zero.to("meta"))
    assert thresholds(logits[:0], one[:0], whole[:0], one[:0], zero[:0]).shape == (0,)
    monkeypatch.setenv("WEFT_DEBUG", "1")
    for value in (-1.0, float("nan"), float("inf")):
        refused(
            rf"temperatures\[1\]={value} is no number", logits, torch.tensor([1.0, value]).to(device), whole, one, zero
        )
    refused(r"top_k\[0\]=-1 is", logits, one, whole - 1, one, zero)
    for value in (0.0, 1.5, float("nan")):
        refused(rf"top_p\[0\]={value} is outside", logits, one, whole, one * value, zero)
    for value in (-0.5, 1.5, float("nan")):
        refused(rf"min_p\[0\]={value} is outside", logits, one, whole, one, one * value)
    assert thresholds(logits, one, whole, one, zero).tolist() == [-torch.inf] * 2
