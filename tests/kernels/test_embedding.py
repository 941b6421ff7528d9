from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from weft.errors import KernelError
from weft.kernels import embedding as module
from weft.kernels.embedding import _embedding, embedding, reference

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TOKENS = {
    "repeated": [3, 0, 3, 9, 3, 0, 4],
    "one for all rows": [5] * 37,
    "each once": list(range(12)),
    "a single one": [11],
    "none": [],
}


def made(tokens: list[int], dtype: torch.dtype, device: torch.device, width: int = 20) -> tuple[Tensor, ...]:
    """Weight of 12 tokens sliced from NaN, ids, and the gradient of the output, sliced from NaN too."""
    ids = torch.tensor(tokens, dtype=torch.int64)
    weight, gradient = torch.full((12, width + 7), torch.nan), torch.full((len(ids), width + 9), torch.nan)
    weight[:, 3:-4], gradient[:, 5:-4] = torch.randn(12, width), torch.randn(len(ids), width)
    return weight.to(dtype)[:, 3:-4].to(device), ids.to(device), gradient.to(dtype)[:, 5:-4].to(device)


def ordered(ids: Tensor, gradient: Tensor, vocab_size: int) -> Tensor:
    """Sums of rows in the order in which they stand, in float32, rounded once."""
    sums = torch.zeros(vocab_size, gradient.shape[1])
    for token, row in zip(ids.tolist(), gradient.cpu().float(), strict=True):
        sums[token] += row
    return sums.to(gradient.dtype)


def gradient_of(weight: Tensor, ids: Tensor, gradient: Tensor) -> Tensor:
    leaf = weight.detach().requires_grad_()
    return torch.autograd.grad(embedding(leaf, ids), leaf, gradient)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("width", [1, 20, 1030])
def test_rows_and_ordered_sums_are_met_to_the_bit(
    width: int, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight, ids, gradient = made(TOKENS[name], dtype, device, width)
    assert torch.equal(embedding(weight, ids), reference(weight, ids))
    assert torch.equal(embedding(weight, ids.int()), reference(weight, ids))
    assert torch.equal(gradient_of(weight, ids, gradient).cpu(), ordered(ids, gradient, 12))


def test_many_rows_give_the_same_bits_in_every_run(device: torch.device) -> None:
    """Of rows whose sum depends on its order: large ones cancel beside small ones."""
    weight = torch.zeros(7, 33, device=device)
    ids = torch.randint(7, (600,), device=device)
    gradient = torch.randn(600, 33, device=device) * 10.0 ** torch.randint(-4, 5, (600, 1), device=device)
    first = gradient_of(weight, ids, gradient)
    assert all(torch.equal(gradient_of(weight, ids, gradient), first) for _ in range(3))
    assert torch.equal(first.cpu(), ordered(ids, gradient, 7))
    backwards = gradient_of(weight, ids.flip(0), gradient.flip(0))
    assert not torch.equal(backwards, first), "an order that does not matter proves nothing"
    torch.testing.assert_close(backwards, first, rtol=1e-4, atol=1.0)


def test_rows_that_no_token_names_neither_count_nor_get_a_gradient(device: torch.device) -> None:
    """A vocabulary padded to a round number: rows of NaN stay unread, and what is added to them is 0, not memory."""
    weight, ids, gradient = made(TOKENS["repeated"], torch.float32, device)
    padded = torch.full((64, 20), torch.nan, device=device)
    padded[:12] = weight
    assert torch.equal(embedding(padded, ids), embedding(weight, ids))
    found = gradient_of(padded, ids, gradient)
    assert torch.equal(found[:12], gradient_of(weight, ids, gradient))
    assert (found[12:] == 0).all()


@pytest.mark.parametrize("expanded", [False, True])
def test_layout_of_the_gradient_changes_no_bit(expanded: bool, device: torch.device) -> None:
    weight, ids, gradient = made(TOKENS["repeated"], torch.float32, device)
    gradient = gradient[:1].expand(len(ids), -1) if expanded else gradient.T.contiguous().T
    assert torch.equal(gradient_of(weight, ids, gradient), gradient_of(weight, ids, gradient.clone().contiguous()))


def test_nothing_is_written_beside_the_results(
    guarded: Callable[..., tuple[Tensor, Callable[[], None]]], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    checks: list[Callable[[], None]] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, **_: object) -> Tensor:
        tensor, untouched = guarded(shape, dtype)
        checks.append(untouched)
        return tensor

    fake = ModuleType("torch")
    fake.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    fake.empty = allocate  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "torch", fake)
    weight, ids, gradient = made(TOKENS["repeated"], torch.float16, device, 1030)
    leaf = weight.detach().requires_grad_()
    output = embedding(leaf, ids)
    found = torch.autograd.grad(output, leaf, gradient)[0]
    assert torch.equal(output, weight[ids])
    assert torch.equal(found.cpu(), ordered(ids, gradient, 12))
    assert len(checks) == 2, "output and gradient"
    for untouched in checks:
        untouched()


@pytest.mark.parametrize("fault", ["order", "starts"])
def test_rows_of_another_token_would_show(fault: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    weight, ids, gradient = made(TOKENS["repeated"], torch.float32, device)

    class Planted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(rows: Tensor, stride: int, order: Tensor, starts: Tensor, *rest: object, **options: int) -> None:
                order, starts = (order.flip(0), starts) if fault == "order" else (order, starts.clamp(max=1))
                kernel[grid](rows, stride, order, starts, *rest, **options)

            return launch

    kernel = module._sum_kernel
    monkeypatch.setattr(module, "_sum_kernel", Planted())
    assert not torch.equal(gradient_of(weight, ids, gradient).cpu(), ordered(ids, gradient, 12))


def test_ids_out_of_range_are_named_in_debug_mode_and_never_read(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    weight, _, gradient = made([0] * 4, torch.float32, device)
    for wrong in (12, -1, 2**40):
        ids = torch.tensor([3, wrong, 3, 0], device=device)
        monkeypatch.setenv("WEFT_DEBUG", "1")
        with pytest.raises(KernelError, match=rf"(?s)token_ids\[1\] is {wrong}.*0 to 11"):
            embedding(weight, ids)
        monkeypatch.delenv("WEFT_DEBUG")
        leaf = weight.detach().requires_grad_()
        output = _embedding(leaf, ids)
        assert output[1].isnan().all()
        assert torch.equal(output[[0, 2, 3]], weight[[3, 3, 0]])
        found = torch.autograd.grad(output, leaf, gradient)[0]
        assert torch.equal(found.cpu(), ordered(ids[[0, 2, 3]], gradient[[0, 2, 3]], 12))


def test_an_empty_vocabulary_and_rows_without_columns_are_no_error(device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    assert embedding(torch.zeros(0, 4, device=device), nothing).shape == (0, 4)
    assert embedding(torch.zeros(4, 0, device=device), nothing + 1).shape == (0, 0)
    weight = torch.zeros(3, 4, device=device)
    assert (gradient_of(weight, nothing, torch.zeros(0, 4, device=device)) == 0).all()


def test_the_operator_is_what_it_says_it_is(device: torch.device) -> None:
    weight, ids, _ = made(TOKENS["repeated"], torch.float32, device)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(_embedding, (weight.contiguous().requires_grad_(), ids), test_utils=checks)


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    weight, ids = torch.zeros(5, 8, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    for message, attempt in {
        r"weight is torch.float32 \(8,\)": lambda: embedding(weight[0], ids),
        "weight is torch.int32": lambda: embedding(weight.int(), ids),
        "dense rows": lambda: embedding(weight.T, ids),
        "token_ids is torch.float32": lambda: embedding(weight, weight[0]),
        r"token_ids is torch.int64 \(1, 3\)": lambda: embedding(weight, ids[None]),
    }.items():
        with pytest.raises(KernelError, match=message):
            attempt()
