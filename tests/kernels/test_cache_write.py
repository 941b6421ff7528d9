"""Rotation and cache write against float64: heads, norms, strides, slots; queries too, between guard bands of NaN."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.accuracy import SINGLE, assert_by_the_rule, assert_within
from tests.kernels.paged_step import LAYER, Step, assert_pool_equals, make_step, truth
from weft.errors import KernelError
from weft.kernels import cache_write

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def written(step: Step, pool: torch.Tensor) -> torch.Tensor:
    new = step.new
    return cache_write.rotate_and_write(
        step.qkv, new.positions, new.slots, new.rotation, pool, LAYER, num_query_heads=step.num_query_heads
    )


def referred(step: Step, pool: torch.Tensor) -> torch.Tensor:
    return cache_write.reference(step.qkv, step.new.positions, step.new.slots, step.new.rotation, pool, LAYER)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": True},
        {"heads": (9, 3)},
        {"heads": (1, 1), "head_dim": 256},
        {"head_dim": 80, "norm": True},
        {"head_dim": 2},
        {"block_size": 1},
        {"block_size": 7},
        {"magnitude": 50.0, "norm": True},
    ],
    ids=str,
)
def test_every_head_is_turned_and_lies_in_its_slot(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    step = make_step((1, 20, 33), (1, 3, 17), dtype=dtype, device=device, **options)
    pool, wide = step.pool.clone(), step.pool.double()
    found = written(step, pool)
    exact = referred(step.to(torch.float64), wide)
    head_dim, longest = exact.shape[-1], max(exact.norm(dim=-1).max(), wide.nan_to_num().norm(dim=-1).max()).item()
    inside = (head_dim + 16) * SINGLE * longest  # a norm's sum, and the few products and sums of a turned pair
    assert_within(found, exact, inside)
    new = step.pool.isnan() & ~wide.isnan()
    assert_within(pool[new], wide[new], inside)
    assert torch.equal(pool.isnan(), wide.isnan())
    old = ~step.pool.isnan()
    assert torch.equal(pool[old], step.pool[old])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_errors_of_many_heads_keep_the_rule(norm: bool, dtype: torch.dtype, device: torch.device) -> None:
    step = make_step((120, 10), (120, 10), norm=norm, dtype=dtype, device=device)
    low, exact = referred(step, step.pool.clone()), referred(step.to(torch.float64), step.pool.double())
    assert_by_the_rule(written(step, step.pool.clone()), low, exact)


def test_slots_of_minus_one_are_not_written(device: torch.device) -> None:
    step = make_step((9, 21), (4, 5), device=device)
    slots = step.new.slots.clone()
    slots[::2] = -1
    step = replace(step, new=replace(step.new, slots=slots))
    pool = step.pool.clone()
    query = written(step, pool)
    assert query.isfinite().all()
    expected = step.pool.clone()
    referred(step, expected)
    assert_pool_equals(pool, expected, step.pool)
    faulty = step.pool.clone()
    faulty.flatten(2, 3)[:, LAYER, -1] = 0.0
    with pytest.raises(AssertionError):
        assert_pool_equals(faulty, expected, step.pool)


def test_rows_sliced_from_a_wider_matrix_and_integers_of_either_width(device: torch.device) -> None:
    step = make_step((9, 21), (4, 5), device=device)
    wide = torch.full((9, step.qkv.shape[1] + 24), torch.nan, device=device)
    wide[:, 8:-16] = step.qkv
    new = replace(step.new, positions=step.new.positions.int(), slots=step.new.slots.int())
    pools = step.pool.clone(), step.pool.clone()
    assert torch.equal(written(replace(step, qkv=wide[:, 8:-16], new=new), pools[0]), written(step, pools[1]))
    assert torch.equal(pools[0].nan_to_num(7), pools[1].nan_to_num(7))


def test_nothing_new_is_nothing_done(device: torch.device) -> None:
    step = make_step((9,), (1,), device=device)
    new = replace(step.new, positions=step.new.positions[:0], slots=step.new.slots[:0])
    assert written(replace(step, qkv=step.qkv[:0], new=new), step.pool).shape == (0, 6, 16)


@pytest.mark.gpu
def test_a_slot_beyond_two_to_the_31_elements_is_reached(device: torch.device) -> None:
    step = make_step((5, 9), (5, 9), heads=(4, 2), head_dim=64, device=device, dtype=torch.bfloat16)
    blocks = 2**31 // (16 * 2 * 64) + 64
    pool = torch.zeros(2, 1, blocks, 16, 2, 64, dtype=torch.bfloat16, device=device)
    slots = torch.arange(14, device=device) + (blocks - 1) * 16
    cache_write.rotate_and_write(step.qkv, step.new.positions, slots, step.new.rotation, pool, 0, num_query_heads=4)
    near = torch.zeros(2, 1, 4, 16, 2, 64, dtype=torch.bfloat16, device=device)
    cache_write.rotate_and_write(
        step.qkv, step.new.positions, slots - slots[0], step.new.rotation, near, 0, num_query_heads=4
    )
    assert torch.equal(pool[:, :, -1], near[:, :, 0])
    assert pool[:, :, :-1].count_nonzero() == 0


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    step = make_step((9, 21), (4, 5), device=device)
    rotation, new = step.new.rotation, step.new
    for message, attempt in {
        "qkv has shape": lambda: written(replace(step, num_query_heads=4), step.pool),
        "qkv is torch.float16": lambda: written(replace(step, qkv=step.qkv.half()), step.pool),
        "positions must be 9": lambda: written(replace(step, new=replace(new, positions=new.positions[:3])), step.pool),
        "slots must be 9": lambda: written(replace(step, new=replace(new, slots=new.slots.float())), step.pool),
        "cos has shape": lambda: written(
            replace(step, new=replace(new, rotation=replace(rotation, cos=rotation.cos[:, :3]))), step.pool
        ),
        "queries alone": lambda: written(
            replace(step, new=replace(new, rotation=replace(rotation, query_norm=rotation.cos[0]))), step.pool
        ),
        "the pool must be contiguous": lambda: written(step, step.pool.transpose(3, 4)),
    }.items():
        with pytest.raises(KernelError, match=message):
            attempt()
    assert truth(step)[0].isfinite().all()
