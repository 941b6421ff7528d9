"""Where in a pool a request lies changes no bit, and neither does a pool of more elements than 32 bits can count."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_step import Step, decode, make_step, prefill

P, KEY_HEADS, HEAD_DIM = 16, 2, 64
BEYOND = 2**31 // (P * KEY_HEADS * HEAD_DIM) + 5  # the first blocks whose elements no int32 can address
STEPS: dict[str, tuple[Callable[[Step, Tensor], Tensor], tuple[int, ...]]] = {
    "decode with rotation and write": (decode, (1, 1, 1)),
    "write, then prefill": (prefill, (1, 20, 40)),
}


def placed(step: Step, first: int, pool: Tensor) -> Step:
    """The same step with its blocks from `first` on; the pool's others hold NaN."""
    pool.fill_(torch.nan)
    pool[:, :, first : first + step.pool.shape[2]] = step.pool
    tables = torch.where(step.tables == 2**30, step.tables, step.tables + first)
    return replace(step, tables=tables, new=replace(step.new, slots=step.new.slots + first * P))


def made(counts: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Step:
    sizes = {"heads": (4, KEY_HEADS), "head_dim": HEAD_DIM, "block_size": P}
    return make_step((17, 33, 70), counts, device=device, dtype=dtype, **sizes)


def assert_same_at(first: int, kind: str, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
    run, counts = STEPS[kind]
    step = made(counts, device, dtype)
    count = step.pool.shape[2]
    near = step.pool.clone()
    expected = run(step, near)
    pool = torch.empty(2, 2, blocks, P, KEY_HEADS, HEAD_DIM, dtype=dtype, device=device)
    found = run(placed(step, first, pool), pool)
    assert torch.equal(found, expected)
    assert torch.equal(pool[:, :, first : first + count].nan_to_num(nan=7.0), near.nan_to_num(nan=7.0))
    assert pool[:, :, :first].isnan().all(), "written before the blocks it owns"
    assert pool[:, :, first + count :].isnan().all(), "written behind the blocks it owns"


@pytest.mark.parametrize("kind", STEPS)
def test_blocks_elsewhere_give_the_same_bits(kind: str, device: torch.device) -> None:
    assert_same_at(7, kind, 40, device, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", STEPS)
def test_blocks_beyond_2_31_elements_give_the_same_bits(kind: str, device: torch.device) -> None:
    """Keys and values of two layers, 17 GiB."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    assert_same_at(BEYOND, kind, BEYOND + 40, device, torch.bfloat16)
