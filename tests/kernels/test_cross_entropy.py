import pytest
import torch

from tests.kernels.paged_step import assert_as_accurate
from weft.errors import KernelError
from weft.kernels.cross_entropy import cross_entropy, reference

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def gradients(function: object, *inputs: torch.Tensor, **options: int) -> tuple[torch.Tensor, ...]:
    hidden, head = (tensor.detach().clone().requires_grad_() for tensor in inputs[:2])
    loss = function(hidden, head, inputs[2], **options)  # type: ignore[operator]
    return loss.detach(), *torch.autograd.grad(loss * 3.0, (hidden, head))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "vocab_size", "chunk"), [(12, 5, 1), (20, 131, 3), (6, 4097, 6), (15, 100, 100)])
@pytest.mark.parametrize("magnitude", [1.0, 4.0])
def test_loss_and_gradients_are_as_accurate_as_torchs(
    count: int, vocab_size: int, chunk: int, magnitude: float, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, head = (torch.randn(count, 16) * magnitude).to(dtype), torch.randn(vocab_size, 16).to(dtype) * 0.25
    targets = torch.randint(vocab_size, (count,))
    targets[1::3] = -100
    found = gradients(cross_entropy, *(tensor.to(device) for tensor in (hidden, head, targets)), chunk=chunk)
    low = gradients(reference, hidden, head, targets)
    exact = gradients(reference, hidden.double(), head.double(), targets)
    torch.testing.assert_close(
        found[0].cpu().double(), exact[0].double(), rtol=5e-3 if dtype != torch.float32 else 1e-6, atol=1e-6
    )
    for mine, torchs, true in zip(found[1:], low[1:], exact[1:], strict=True):
        assert_as_accurate(mine.cpu(), torchs, true, rms=6.0, most=12.0)


def test_the_size_of_a_chunk_changes_no_loss_of_a_row(device: torch.device) -> None:
    hidden, head = torch.randn(9, 16, device=device), torch.randn(50, 16, device=device)
    targets = torch.randint(50, (9,), device=device)
    losses = [cross_entropy(hidden, head, targets, chunk=chunk) for chunk in (1, 4, 9)]
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(3), rtol=1e-6, atol=0)


def test_a_target_off_by_one_or_counted_in_vain_would_show(device: torch.device) -> None:
    hidden, head, targets = torch.randn(6, 16), torch.randn(50, 16), torch.arange(6)
    exact, low = (reference(hidden.to(d), head.to(d), targets) for d in (torch.float64, torch.float32))
    for wrong in (targets + 1, torch.where(targets == 3, -100, targets)):
        found = cross_entropy(hidden.to(device), head.to(device), wrong.to(device)).cpu()
        with pytest.raises(AssertionError):
            assert_as_accurate(found, low, exact)


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    hidden, head = torch.zeros(3, 8, device=device), torch.zeros(5, 8, device=device)
    targets = torch.zeros(3, dtype=torch.int64, device=device)
    for message, attempt in {
        "head torch.float16": lambda: cross_entropy(hidden, head.half(), targets),
        r"\(5, 7\)": lambda: cross_entropy(hidden, head[:, :7], targets),
        "targets is torch.int32": lambda: cross_entropy(hidden, head, targets.int()),
        "chunk=0": lambda: cross_entropy(hidden, head, targets, chunk=0),
    }.items():
        with pytest.raises(KernelError, match=message):
            attempt()
