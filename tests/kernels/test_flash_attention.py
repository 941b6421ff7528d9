"""Flash attention against float64: every head dimension, ratio, length, layout and mask, with planted faults."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.accuracy import assert_by_the_rule
from tests.kernels.attention_cases import (
    DESCRIPTORS,
    NAMES,
    POINTERS,
    STARTS,
    UNEVEN,
    Case,
    check,
    judge,
    packed,
    results,
    roundings,
)
from weft.errors import KernelError
from weft.kernels import _flash_launch
from weft.kernels._flash_tiles import Choice
from weft.kernels._jit import HAS_TRITON
from weft.kernels.flash_attention import _flash_attention, attention_reference, flash_attention

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

HALF = torch.float16


@pytest.mark.parametrize("choice", [UNEVEN, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 1, 64),
        Case(15, 15, 2, 1, 64, dtype=HALF),
        Case(16, 16, 3, 1, 80),
        Case(17, 17, 8, 1, 96, dtype=HALF),
        Case(17, 17, 1, 1, 128, causal=False),
        Case(20, 20, 1, 1, 256),
        Case(127, 127, 1, 1, 64, dtype=HALF),
        Case(1, 40, 2, 2, 64, dtype=HALF),
        Case(18, 47, 2, 1, 16, batch=2),
        Case(47, 18, 2, 1, 16, batch=2),
        Case(33, 18, 1, 1, 80, causal=False, dtype=HALF),
        Case(33, 33, 2, 1, 20),
    ],
    ids=str,
)
def test_output_and_gradients_stand_beside_float64_as_closely_as_plain_torch(
    case: Case, choice: Choice, device: torch.device
) -> None:
    check(case, device, choice)


ROUNDED = [HALF, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
@pytest.mark.parametrize(
    "case", [Case(15, 15, 8, 8, 64, batch=2), Case(96, 96, 4, 2, 64), Case(96, 96, 2, 2, 64, causal=False)], ids=str
)
def test_pools_of_results_are_as_accurate_as_plain_torchs(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    case = replace(case, dtype=dtype)
    tensors = case.tensors(device)
    exact = [tensor.double() for tensor in tensors]
    pools = (results(attend, tensors, causal=case.causal) for attend in (flash_attention, attention_reference))
    truth = results(attention_reference, exact, causal=case.causal)
    for name, *pool in zip(NAMES, *pools, truth, strict=True):
        if name != "lse":  # float32, and one a row: `judge` compares it
            assert_by_the_rule(*pool)


def test_huge_scores_neither_overflow_nor_lose_the_largest(device: torch.device) -> None:
    check(Case(33, 33, 1, 1, 16, magnitude=1000.0), device, POINTERS)


def test_a_scale_of_ones_own_counts_both_ways(device: torch.device) -> None:
    check(Case(20, 20, 1, 1, 16), device, POINTERS, scale=0.7)


@pytest.mark.parametrize("head_dim", [80, 160])
def test_the_last_columns_count(head_dim: int, device: torch.device) -> None:
    tensors = Case(20, 20, 1, 1, head_dim).tensors(device)
    for tensor in tensors[:3]:
        tensor[..., :-8] = 0
    exact = [tensor.double() for tensor in tensors]
    judge(
        results(flash_attention, tensors, choice=POINTERS),
        results(attention_reference, tensors),
        results(attention_reference, exact),
        roundings(tensors),
    )


@pytest.mark.parametrize(("num_queries", "num_keys"), [(20, 20), (18, 35), (35, 18)])
def test_every_row_sees_just_the_keys_up_to_its_own(num_queries: int, num_keys: int, device: torch.device) -> None:
    """Values are unit vectors, so an output shows which keys were seen, and how much each counted."""
    query, key = torch.zeros(1, num_queries, 1, 64, device=device), torch.zeros(1, num_keys, 1, 64, device=device)
    value = torch.eye(num_keys, 64, device=device)[None, :, None]
    output, _ = flash_attention(query, key, value, choice=POINTERS)
    seen = torch.ones(num_queries, num_keys, device=device).tril(num_keys - num_queries)
    assert torch.equal(output[0, :, 0, :num_keys] != 0, seen != 0)
    torch.testing.assert_close(output[0, :, 0, :num_keys], seen / seen.sum(1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize("choice", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
def test_rows_that_see_no_key_give_zero_and_pass_no_gradient_on(choice: Choice, device: torch.device) -> None:
    tensors = Case(40, 20, 2, 1, 16, dtype=HALF).tensors(device)
    output, lse, query_gradient, *others = results(flash_attention, tensors, choice=choice)
    assert (output[:, :20] == 0).all()
    assert (lse[..., :20] == -torch.inf).all()
    assert (query_gradient[:, :20] == 0).all()
    assert all(gradient.isfinite().all() for gradient in others)
    nothing = [tensors[0], tensors[1][:, :0], tensors[2][:, :0], tensors[3]]
    output, lse, *gradients = results(flash_attention, nothing)
    assert (output == 0).all()
    assert (lse == -torch.inf).all()
    assert (gradients[0] == 0).all()


# Rows of 16 columns keep their numbers beside the gradient of queries, rows of 64 in it.
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize(
    ("choice", "dtype"), [(POINTERS, torch.float32), (DESCRIPTORS, HALF)], ids=["pointers", "descriptors"]
)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_do_not_see_each_other(
    causal: bool, choice: Choice, dtype: torch.dtype, head_dim: int, device: torch.device
) -> None:
    tensors, starts = packed(device, dtype, head_dim=head_dim)
    exact = [tensor.double() for tensor in tensors]
    arguments = {"causal": causal, "query_starts": starts}
    judge(
        results(flash_attention, tensors, choice=choice, **arguments),
        results(attention_reference, tensors, **arguments),
        results(attention_reference, exact, **arguments),
        roundings(tensors, **arguments),
    )


def check_isolation(choice: Choice, dtype: torch.dtype, device: torch.device, head_dim: int = 16) -> None:
    """A sequence of NaN leaves every bit of the others as it was."""
    tensors, starts = packed(device, dtype, num_heads=1, head_dim=head_dim)
    before = results(flash_attention, tensors, query_starts=starts, choice=choice)
    for tensor in tensors:
        tensor[STARTS[4] : STARTS[5]] = torch.nan
    after = results(flash_attention, tensors, query_starts=starts, choice=choice)
    before[1], after[1] = before[1].T, after[1].T
    for name, one, other in zip(NAMES, before, after, strict=True):
        assert torch.equal(one[: STARTS[4]], other[: STARTS[4]]), f"{name} before the NaN"
        assert torch.equal(one[STARTS[5] :], other[STARTS[5] :]), f"{name} behind the NaN"


# NumPy, which the interpreter computes with, warns of every NaN.
nan_is_meant = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@nan_is_meant
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize(
    ("choice", "dtype"), [(POINTERS, torch.float32), (DESCRIPTORS, HALF)], ids=["pointers", "descriptors"]
)
def test_a_sequence_of_nan_stays_alone(choice: Choice, dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    check_isolation(choice, dtype, device, head_dim)


def test_queries_and_keys_may_be_packed_differently(device: torch.device) -> None:
    tensors = [tensor[0] for tensor in Case(20, 37, 2, 1, 16).tensors(device)]
    arguments = {
        "query_starts": torch.tensor([0, 3, 20], dtype=torch.int32, device=device),
        "key_starts": torch.tensor([0, 20, 37], dtype=torch.int32, device=device),
    }
    exact = [tensor.double() for tensor in tensors]
    judge(
        results(flash_attention, tensors, choice=POINTERS, **arguments),
        results(attention_reference, tensors, **arguments),
        results(attention_reference, exact, **arguments),
        roundings(tensors, **arguments),
    )


@pytest.mark.parametrize("choice", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
def test_layout_never_changes_a_bit(choice: Choice, device: torch.device) -> None:
    """Contiguous, sliced from a packed projection among NaN, heads before tokens, expanded, and column by column."""
    case = Case(20, 20, 2, 2, 16, dtype=HALF)
    tensors = case.tensors(device)
    tensors[3] = tensors[3][:, :, :1].expand(-1, -1, 2, -1)
    expected = results(flash_attention, [tensor.contiguous() for tensor in tensors], choice=choice)
    projection = torch.full((1, 20, 8, 16), torch.nan, dtype=HALF, device=device)
    for index, tensor in enumerate(tensors[:3]):
        projection[:, :, 2 * index + 1 : 2 * index + 3] = tensor
    layouts = {
        "sliced": [projection[:, :, 2 * index + 1 : 2 * index + 3] for index in range(3)],
        "heads first": [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors[:3]],
        "columns": [tensor.transpose(1, 3).contiguous().transpose(1, 3) for tensor in tensors[:3]],
    }
    for name, layout in layouts.items():
        found = results(flash_attention, [*layout, tensors[3]], choice=choice)
        assert all(map(torch.equal, found, expected)), name


def test_two_runs_give_the_same_bits(device: torch.device) -> None:
    tensors = Case(40, 40, 4, 2, 16, dtype=HALF).tensors(device)
    first, second = (results(flash_attention, tensors, choice=POINTERS) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_lse_has_a_gradient_too(device: torch.device) -> None:
    tensors = Case(20, 20, 2, 1, 16).tensors(device)

    def both(attend: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        output, lse = attend(*leaves)
        return list(torch.autograd.grad((output * inputs[3]).sum() + lse.sin().sum(), leaves))

    exact = both(attention_reference, [tensor.double() for tensor in tensors])
    for found, truth in zip(both(flash_attention, tensors), exact, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


def test_the_operator_is_what_it_says_it_is(device: torch.device) -> None:
    inputs = [tensor.requires_grad_() for tensor in Case(17, 17, 2, 1, 16).tensors(device)[:3]]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (*inputs, None, None, 17, 17, True, 0.25, str(POINTERS))
    torch.library.opcheck(_flash_attention, arguments, test_utils=checks)


def wrong() -> Iterator[tuple[str, dict[str, object]]]:
    q, k = torch.zeros(1, 4, 4, 16), torch.zeros(1, 4, 2, 16)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    row, rows = {"query": q[0], "key": k[0], "value": k[0]}, {"query": q, "key": k, "value": k}
    yield "key is torch.float16", {**rows, "key": k.half()}
    yield "query is torch.float64", {name: tensor.double() for name, tensor in rows.items()}
    yield "4 query heads over 3 kv heads", {**rows, "key": torch.zeros(1, 4, 3, 16), "value": torch.zeros(1, 4, 3, 16)}
    yield "head dimension 257", {name: torch.zeros(1, 4, 2, 257) for name in rows}
    yield "head dimension 16 of query, 8 of key", {**rows, "key": k[..., :8], "value": k[..., :8]}
    yield "value \\[1, 3, 2, 16\\]", {**rows, "value": k[:, :3]}
    yield "query has shape \\[4, 4, 16\\]", row
    yield (
        "1 sequences of queries, 2 of keys",
        {**rows, "key": k.expand(2, -1, -1, -1), "value": k.expand(2, -1, -1, -1)},
    )
    yield "scale is -1", {**rows, "scale": -1.0}
    yield "query_starts is torch.int64", {**row, "query_starts": starts.long()}
    yield "from 0 to 3, expected 0 to 4", {**row, "query_starts": torch.tensor([0, 3], dtype=torch.int32)}
    yield "falls from 3 to 1 at 1", {**row, "query_starts": torch.tensor([0, 3, 1, 4], dtype=torch.int32)}
    yield "a sequence of 2, the longest is said to be 1", {**row, "query_starts": starts, "longest_query": 1}
    yield "key_starts 2", {**row, "query_starts": starts, "key_starts": torch.tensor([0, 4], dtype=torch.int32)}


@pytest.mark.parametrize(("message", "arguments"), [pytest.param(*pair, id=pair[0]) for pair in wrong()])
def test_what_no_kernel_can_take_is_named(
    message: str, arguments: dict[str, object], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "1")
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(KernelError, match=message):
        flash_attention(**moved)  # type: ignore[arg-type]


def test_a_misspelt_tile_is_named() -> None:
    with pytest.raises(KernelError, match="64by64"):
        Choice.parse("64by64 / 64x64 w4 s1 / 64x64 w4 s1")


FAULTS = {
    "forward sees one key too many": ("forward", "(row + (shift - first))", "(row + (shift - first) + 1)"),
    "forward sees one key too few": ("forward", "(row + (shift - first))", "(row + (shift - first) - 1)"),
    "output is not rescaled": ("forward", "output * keep[:, None]", "output"),
    "sum is not rescaled": ("forward", "total * keep + ", "total + "),
    "scale is dropped": ("forward", "scores * scale, float", "scores, float"),
    "unmasked blocks reach the diagonal": ("forward", "start + shift + 1,", "start + shift + BLOCK_M,"),
    "another kv head is read": ("forward", "kv_head = head // group", "kv_head = head * 0"),
    "scale of the key gradient is dropped": ("backward_keys", "key_sums * score_scale", "key_sums"),
    "key gradients are summed over other heads": ("backward_keys", "= kv_head * group\n", "= kv_head\n"),
    "key gradients leave a head out": ("backward_keys", "first_head + member", "first_head"),
    "key gradients see one row too few": ("backward_keys", "[:, None] <= row[None, :]", "[:, None] < row[None, :]"),
    "key gradients start a block late": ("backward_keys", "(-diagonal, 0)", "(BLOCK_M - diagonal, 0)"),
    "query gradients see one key too many": ("backward_queries", "(shift - first))", "(shift - first) + 1)"),
    "query gradients keep what softmax subtracts": ("backward_queries", "slopes + start_slope[:, None]", "slopes"),
    "what softmax subtracts is added": ("delta", "numbers + GROUP, -sums", "numbers + GROUP, sums"),
    "numbers of one group are written over another's": ("delta", "lanes(numbers_stride_token,", "lanes(0,"),
    "numbers of the first head are read for all": ("backward_keys", "member * numbers_stride_head + ", ""),
}  # fmt: skip


def with_fault(monkeypatch: pytest.MonkeyPatch, folder: Path, part: str, right: str, fault: str) -> None:
    """Launch a copy of a kernel in which one expression is another."""
    original = sys.modules[f"weft.kernels._flash_{part}"]
    source = Path(original.__file__ or "").read_text(encoding="utf-8")
    assert right in source, "the fault has nowhere to go"
    path = folder / f"faulty_{part}.py"
    path.write_text(source.replace(right, fault), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(_flash_launch, f"flash_{part}", getattr(module, f"flash_{part}"))


@nan_is_meant
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_convicted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = Case(21, 21, 4, 2, 16)
    check(case, device, POINTERS)
    with_fault(monkeypatch, tmp_path, *FAULTS[name])
    with pytest.raises(AssertionError):
        check(case, device, POINTERS)


@nan_is_meant
def test_rows_of_the_next_sequence_are_convicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    with_fault(monkeypatch, tmp_path, "forward", "CHECKED and CLEAN", "False")
    with pytest.raises(AssertionError):
        check_isolation(DESCRIPTORS, HALF, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_with_the_tiles_that_are_launched(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for num_queries, num_keys, ratio in ((1000, 1000, 1), (127, 515, 3), (515, 127, 2)):
        case = Case(num_queries, num_keys, 2 * ratio, 2, head_dim, causal, dtype, batch=2)
        check(case, torch.device("cuda"), None)


@pytest.mark.gpu
def test_on_a_gpu_far_tensors_are_addressed_right() -> None:
    """The second sequence of a batch lies more than 2^31 elements behind the first."""
    case = Case(300, 300, 2, 2, 64, dtype=torch.bfloat16, batch=2)
    tensors = case.tensors(torch.device("cuda"))
    expected = results(flash_attention, tensors)
    size = tensors[0][0].numel()
    memory = torch.empty((1 << 31) + 4096 + 3 * size, dtype=torch.bfloat16, device="cuda")
    far = []
    for index, tensor in enumerate(tensors[:3]):
        steps = ((1 << 31) + 4096, *tensor.stride()[1:])
        view = memory.as_strided(tensor.shape, steps, index * size)
        far.append(view.copy_(tensor))
    assert all(map(torch.equal, results(flash_attention, [*far, tensors[3]]), expected))
