"""Which kernel multiplies: what an H200 showed, and that a row's planes never depend on the batch."""

from dataclasses import replace

import pytest
import torch

from weft.kernels import _few_rows_tiles as tiles
from weft.layers.kernel_choice import ProductShape, Use, batch_invariant, choose

MATRICES: dict[str, tuple[int, int, Use]] = {
    "qkv": (3072, 2048, "plain"),
    "output": (2048, 2048, "added"),
    "gate-up": (16_384, 2048, "swiglu"),
    "down": (2048, 8192, "added"),
    "head": (128_256, 2048, "plain"),
}


def shape_of(name: str, rows: int, dtype: torch.dtype = torch.bfloat16) -> ProductShape:
    outer, inner, use = MATRICES[name]
    return ProductShape(
        rows=rows, outer=outer, inner=inner, use=use, has_bias=False, dtype=dtype, compute_capability=90
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, {"one_pass": set(MATRICES)}),
        (8, {"few_rows": set(MATRICES)}),
        (64, {"few_rows": set(MATRICES)}),
        (65, {"library": set(MATRICES)}),
        (256, {"library": set(MATRICES)}),
    ],
)
def test_a_1b_layer_is_multiplied_by_what_was_fastest(rows: int, expected: dict[str, set[str]]) -> None:
    chosen: dict[str, set[str]] = {}
    for name in MATRICES:
        chosen.setdefault(choose(shape_of(name, rows)).product, set()).add(name)
    assert chosen == expected


@pytest.mark.parametrize("gpu", [0, 80, 89])
def test_few_rows_are_multiplied_by_the_library_where_the_copy_engine_is_missing(gpu: int) -> None:
    shapes = [replace(shape_of(name, 8), compute_capability=gpu) for name in MATRICES]
    assert {choose(shape).product for shape in shapes} == {"library"}


def test_float32_is_multiplied_by_the_library() -> None:
    assert {choose(shape_of(name, 8, torch.float32)).product for name in MATRICES} == {"library"}


@pytest.mark.parametrize("name", ["output", "down"])
def test_planes_of_a_matrix_are_as_many_for_every_batch(name: str) -> None:
    planes = {choose(shape_of(name, rows)).planes for rows in (2, 8, 17, 33, 64)}
    assert planes == {tiles.splits_of(*MATRICES[name][:2])}


@pytest.mark.parametrize(("outer", "inner"), [(1024, 2816), (2048, 8192), (4096, 4096), (4096, 14_336), (8192, 28_672)])
def test_programs_of_a_split_product_find_a_multiprocessor_each(outer: int, inner: int) -> None:
    """Tiles of 64 rows of weights and 64 of x fill one; on 132 of them a second round would double the time."""
    assert -(-outer // 64) * tiles.splits_of(outer, inner) <= 132


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_batch_invariant_sum_is_cut_by_the_matrix_alone(name: str, dtype: torch.dtype, has_bias: bool) -> None:
    rows = (1, 2, 8, 17, 64, 65, 95, 96, 97, 256, 2048)
    chosen = [batch_invariant(replace(shape_of(name, count, dtype), has_bias=has_bias)) for count in rows]
    assert {choice.product for choice in chosen} == {"few_rows"}
    expected = tiles.splits_of(*MATRICES[name][:2]) if MATRICES[name][2] == "added" else None
    assert {choice.planes for choice in chosen} == {expected}
    # Planes and their sum are the same bits; with a bias there must be one plane, for it to be added to the whole.
    assert [choice.summed for choice in chosen] == [
        expected is not None and (has_bias or count >= 96) for count in rows
    ]
