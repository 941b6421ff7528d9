"""Merging attention over parts of the keys: an algebra with an identity, and faults that break it."""

import pytest
import torch

from weft.errors import KernelError
from weft.kernels import merge_parts

SPLIT = 4


def parts_of(counts: list[int], heads: int = 3, head_dim: int = 10) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random scores and values cut into parts of so many keys: the parts, their log sums, and the whole in one pass."""
    scores, values = torch.randn(heads, sum(counts)).double() * 8, torch.randn(heads, sum(counts), head_dim).double()
    parts, log_sums, start = [], [], 0
    for count in counts:
        inside = slice(start, start + count)
        weights = scores[:, inside].softmax(-1) if count else scores[:, inside]
        parts.append((weights[..., None] * values[:, inside]).sum(1))
        log_sums.append(scores[:, inside].logsumexp(-1) / torch.log(torch.tensor(2.0)))
        start += count
    whole = (scores.softmax(-1)[..., None] * values).sum(1)
    return torch.stack(parts, 1), torch.stack(log_sums, 1), whole


def merged(
    parts: torch.Tensor, log_sums: torch.Tensor, device: torch.device, length: int | None = None
) -> torch.Tensor:
    heads, count, head_dim = parts.shape
    out = torch.full((1, heads * head_dim), torch.nan, device=device)
    merge_parts.merge_parts(
        parts.float()[None].to(device),
        log_sums.float()[None].to(device),
        torch.tensor([count * SPLIT if length is None else length], device=device),
        torch.tensor([0, 1], device=device),
        out,
        split=SPLIT,
        most_splits=128,
    )
    return out.view(heads, head_dim).cpu()


@pytest.mark.parametrize(
    "counts", [[5], [3, 4], [0, 5], [5, 0], [0, 0, 7, 0, 0], [1] * 40, [9, 0, 1]], ids=lambda counts: f"{counts}"[:20]
)
def test_parts_make_the_whole_and_empty_ones_change_nothing(counts: list[int], device: torch.device) -> None:
    parts, log_sums, whole = parts_of(counts)
    torch.testing.assert_close(merge_parts.reference(parts.transpose(0, 1), log_sums.T)[0], whole)
    torch.testing.assert_close(merged(parts, log_sums, device).double(), whole, rtol=1e-5, atol=1e-6)


def test_an_empty_part_is_the_identity_to_the_bit(device: torch.device) -> None:
    parts, log_sums, _ = parts_of([6, 3])
    empty, nothing = torch.zeros(3, 1, 10).double(), torch.full((3, 1), -torch.inf).double()
    alone = merged(parts[:, :1], log_sums[:, :1], device)
    assert torch.equal(alone, parts[:, 0].float())
    for order in ([0, 1], [1, 0]):
        pair = [(parts[:, :1], log_sums[:, :1]), (empty, nothing)]
        values, sums = (torch.cat([pair[index][item] for index in order], 1) for item in (0, 1))
        assert torch.equal(merged(values, sums, device), alone)
    assert (merged(empty.repeat(1, 3, 1), nothing.repeat(1, 3), device) == 0).all()
    both, log_sum = merge_parts.reference(empty.transpose(0, 1).repeat(2, 1, 1), nothing.T.repeat(2, 1))
    assert (both == 0).all()
    assert (log_sum == -torch.inf).all()


def test_order_and_grouping_change_no_more_than_rounding(device: torch.device) -> None:
    parts, log_sums, whole = parts_of([2, 7, 1, 5])
    order = [2, 0, 3, 1]
    torch.testing.assert_close(
        merged(parts[:, order], log_sums[:, order], device).double(), whole, rtol=1e-5, atol=1e-6
    )
    first, first_sum = merge_parts.reference(parts[:, :2].transpose(0, 1), log_sums[:, :2].T)
    grouped = torch.cat([first[:, None], parts[:, 2:]], 1), torch.cat([first_sum[:, None], log_sums[:, 2:]], 1)
    torch.testing.assert_close(merged(*grouped, device).double(), whole, rtol=1e-5, atol=1e-6)


def test_parts_that_a_sequence_lacks_are_not_read(device: torch.device) -> None:
    parts, log_sums, _ = parts_of([4, 2])
    room = torch.full((3, 30, 10), torch.nan).double(), torch.full((3, 30), torch.nan).double()
    padded = [torch.cat([real, empty], 1) for real, empty in zip((parts, log_sums), room, strict=True)]
    assert torch.equal(merged(*padded, device, length=6), merged(parts, log_sums, device))


def test_a_merge_without_rescale_would_be_convicted() -> None:
    parts, _, whole = parts_of([5, 5, 5])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(parts.mean(1), whole, rtol=1e-5, atol=1e-6)


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    parts, log_sums, _ = parts_of([4, 2])
    arguments = (
        torch.tensor([6], device=device),
        torch.tensor([0, 1], device=device),
        torch.empty(1, 30, device=device),
    )
    options = {"split": SPLIT, "most_splits": 128}
    with pytest.raises(KernelError, match=r"torch\.float64"):
        merge_parts.merge_parts(parts[None].to(device), log_sums[None].to(device), *arguments, **options)
    with pytest.raises(KernelError, match="contiguous"):
        merge_parts.merge_parts(
            parts[None].float().to(device).transpose(2, 3).contiguous().transpose(2, 3),
            log_sums[None].float().to(device),
            *arguments,
            **options,
        )
