import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.accuracy import SINGLE, assert_by_the_rule, assert_within, unit
from weft.errors import KernelError
from weft.kernels.cross_entropy import cross_entropy, reference

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def gradients(function: object, *inputs: torch.Tensor, **options: int) -> tuple[torch.Tensor, ...]:
    hidden, head = (tensor.detach().clone().requires_grad_() for tensor in inputs[:2])
    loss = function(hidden, head, inputs[2], **options)  # type: ignore[operator]
    return loss.detach(), *torch.autograd.grad(loss * 3.0, (hidden, head))


def roundings(hidden: Tensor, head: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """How far roundings may take the loss and both gradients of `gradients`, in the order of operations of the kernel.

    A logit is off by its sum, whatever its order, and its own rounding. So is a row's loss, by what its logits are at
    most, with its sum of exponentials. A weight of the softmax is off by twice as much of itself, and its gradient is
    rounded to the inputs' dtype; what is below the least normal number of that dtype keeps its digits there only.
    """
    hidden, head = hidden.double(), head.double()
    count, vocab_size = len(hidden), len(head)
    logits = hidden @ head.T
    of_logit = SINGLE * hidden.shape[1] * (hidden.abs() @ head.abs().T)
    of_logit = of_logit + unit(dtype) * (logits.abs() + of_logit)
    counted = targets != -100
    largest = of_logit.max(1).values
    # Exponents reach the spread of a row; each term, their sum and its logarithm are rounded.
    spread = logits.max(1).values - logits.min(1).values
    relative = torch.expm1(2 * largest + SINGLE * (2 * spread + vocab_size + 16))
    of_loss = (2 * largest + relative + 4 * SINGLE * (1 + logits.abs().max(1).values))[counted].mean()
    weights = logits.softmax(1)
    slopes = weights - functional.one_hot(targets.clamp(min=0), vocab_size)
    of_slope = weights * relative[:, None] + SINGLE * slopes.abs()
    of_slope = of_slope + unit(dtype) * (slopes.abs() + of_slope) + torch.finfo(dtype).smallest_normal * unit(dtype)
    slopes, of_slope = (tensor * counted[:, None] for tensor in (slopes.abs(), of_slope))
    factor = 3 / counted.sum()
    return (
        of_loss + SINGLE * count * logits.abs().max(),
        factor * (of_slope @ head.abs() + SINGLE * (vocab_size + 4) * ((slopes + of_slope) @ head.abs())),
        factor * (of_slope.T @ hidden.abs() + SINGLE * (2 * count + 4) * ((slopes + of_slope).T @ hidden.abs())),
    )


def made(
    count: int, width: int, vocab_size: int, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a head and targets, of which every third row has none."""
    hidden = (torch.randn(count, width) * magnitude).to(dtype)
    targets = torch.randint(vocab_size, (count,))
    targets[1::3] = -100
    return hidden, torch.randn(vocab_size, width).to(dtype) * 0.25, targets


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "vocab_size", "chunk"), [(12, 5, 1), (20, 131, 3), (6, 4097, 6), (15, 100, 100)])
@pytest.mark.parametrize("magnitude", [1.0, 4.0])
def test_loss_and_gradients_lie_within_their_roundings(
    count: int, vocab_size: int, chunk: int, magnitude: float, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = made(count, 16, vocab_size, magnitude, dtype)
    found = gradients(cross_entropy, *(tensor.to(device) for tensor in inputs), chunk=chunk)
    exact = gradients(reference, inputs[0].double(), inputs[1].double(), inputs[2])
    for mine, true, inside in zip(found, exact, roundings(*inputs, dtype), strict=True):
        assert_within(mine.cpu(), true, inside)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 4.0])
def test_gradients_are_as_accurate_as_torchs(magnitude: float, dtype: torch.dtype, device: torch.device) -> None:
    inputs = made(160, 80, 300, magnitude, dtype)
    found = gradients(cross_entropy, *(tensor.to(device) for tensor in inputs), chunk=64)
    low = gradients(reference, *inputs)
    exact = gradients(reference, inputs[0].double(), inputs[1].double(), inputs[2])
    for mine, torchs, true in zip(found[1:], low[1:], exact[1:], strict=True):
        assert_by_the_rule(mine.cpu(), torchs, true)


def test_the_size_of_a_chunk_changes_no_loss_of_a_row(device: torch.device) -> None:
    hidden, head = torch.randn(9, 16, device=device), torch.randn(50, 16, device=device)
    targets = torch.randint(50, (9,), device=device)
    losses = [cross_entropy(hidden, head, targets, chunk=chunk) for chunk in (1, 4, 9)]
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(3), rtol=1e-6, atol=0)


def test_a_vocabulary_of_many_turns_of_the_loop(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the maximum grows from turn to turn, what was summed before it shrinks."""
    monkeypatch.setattr(sys.modules["weft.kernels.cross_entropy"], "BLOCK", 16)
    inputs = made(9, 16, 131, 4.0, torch.float32)
    exact = gradients(reference, inputs[0].double(), inputs[1].double(), inputs[2])
    found = gradients(cross_entropy, *(tensor.to(device) for tensor in inputs))
    for mine, true, inside in zip(found, exact, roundings(*inputs, torch.float32), strict=True):
        assert_within(mine.cpu(), true, inside)


def test_a_target_off_by_one_or_counted_in_vain_would_show(device: torch.device) -> None:
    inputs = made(6, 16, 50, 1.0, torch.float16)
    exact = gradients(reference, inputs[0].double(), inputs[1].double(), inputs[2])
    targets = inputs[2]
    for wrong in (torch.where(targets < 0, targets, (targets + 1) % 50), torch.where(targets < 0, 3, targets)):
        found = gradients(cross_entropy, *(tensor.to(device) for tensor in (*inputs[:2], wrong)))
        for mine, true, inside in zip(found, exact, roundings(*inputs, torch.float16), strict=True):
            with pytest.raises(AssertionError):
                assert_within(mine.cpu(), true, inside)


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
