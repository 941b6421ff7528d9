"""Every choice a kernel has, forced in float32 (ieee products): a bfloat16 run alone cannot convict one.

Judged as everything else in float32: each value within what its roundings can do of float64, far inside tier A's 1e-3
of a logit. A tile that is meant for two bytes an element may not fit with four; stages overlap loads and change no
arithmetic, so it is forced with fewer of them before it is left out. The interpreter runs the first of each kind.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.accuracy import SINGLE, assert_within
from tests.kernels.paged_step import assert_attends, decode, make_step, prefill
from weft.kernels import _few_rows_tiles, _paged_decode_tiles, few_rows_gemm, gemv, paged_prefill

IEEE = torch.float32


def _tables(*tables: dict[tuple[int, int], Any]) -> list[tuple[int, Any]]:
    """Each head size with each tile that is listed for it, whatever the dtype."""
    found: dict[tuple[int, Any], None] = {}
    for table in tables:
        for (_, head_dim), tiles in table.items():
            for tile in tiles if isinstance(tiles, tuple) else (tiles,):
                found[head_dim, tile] = None
    return list(found)


def _few(choices: list[Any]) -> list[Any]:
    """The first for the interpreter too, the rest on a GPU."""
    return [choices[0], *(pytest.param(*choice, marks=pytest.mark.gpu) for choice in choices[1:])]


def forced(run: Callable[[Any], Tensor], tile: Any) -> Tensor:
    """With as many stages as fit, or none: then the choice cannot be made in this dtype."""
    from triton.runtime.errors import OutOfResources

    for stages in range(getattr(tile, "num_stages", 1), 0, -1):
        try:
            return run(replace(tile, num_stages=stages) if hasattr(tile, "num_stages") else tile)
        except OutOfResources as error:
            reason = str(error)
    pytest.skip(f"{tile} does not fit in float32: {reason}")


DECODE = _tables(
    _paged_decode_tiles.CANDIDATES,
    _paged_decode_tiles.SPANNING,
    _paged_decode_tiles.NARROW,
    _paged_decode_tiles.CROWDED,
)
NARROW = _tables(_paged_decode_tiles.NARROW)
PREFILL = _tables(paged_prefill.CANDIDATES, paged_prefill.MODEST_CANDIDATES, paged_prefill.CROWDED)


@pytest.mark.parametrize("form", [{"programs": 1}, {"programs": 10**4}, {"programs": 12, "lend": True}], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("head_dim", "tile"), _few(DECODE), ids=str)
def test_every_tile_and_form_of_decode(
    head_dim: int, tile: Any, block_size: int, form: dict[str, Any], device: torch.device
) -> None:
    lengths = (1, 63, 129, 700)
    step = make_step(
        lengths, (1,) * 4, heads=(4, 1), head_dim=head_dim, block_size=block_size, dtype=IEEE, device=device
    )
    assert_attends(forced(lambda tile: decode(step, step.pool.clone(), tile=tile, split=128, **form), tile), step)


@pytest.mark.parametrize("options", [{}, {"norm": True, "window": 40}], ids=str)
@pytest.mark.parametrize("split", [64, 128])
@pytest.mark.parametrize(("head_dim", "tile"), NARROW, ids=str)
def test_the_tile_of_heads_that_share_no_keys(
    head_dim: int, tile: Any, split: int, options: dict[str, Any], device: torch.device
) -> None:
    step = make_step(
        (1, 33, 200), (1,) * 3, heads=(2, 2), head_dim=head_dim, block_size=32, dtype=IEEE, device=device, **options
    )
    for programs in (1, 10**4):
        run: Any = lambda tile, programs=programs: decode(  # noqa: E731
            step, step.pool.clone(), tile=tile, split=split, programs=programs
        )
        assert_attends(forced(run, tile), step)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("head_dim", "tile"), _few(PREFILL), ids=str)
def test_every_tile_of_prefill(head_dim: int, tile: Any, block_size: int, device: torch.device) -> None:
    step = make_step(
        (70, 150, 33), (70, 40, 1), heads=(4, 1), head_dim=head_dim, block_size=block_size, dtype=IEEE, device=device
    )
    assert_attends(forced(lambda tile: prefill(step, step.pool.clone(), tile=tile), tile), step)


def _products(count: int, inner: int, outer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random factors, their product in float64, and how far single precision may take it, whatever the order."""
    x, weight = torch.randn(count, inner), torch.randn(outer, inner) * inner**-0.5
    wide = x.double(), weight.double()
    return x, weight, wide[0] @ wide[1].T, SINGLE * inner * (wide[0].abs() @ wide[1].abs().T)


GEMM = [(tile,) for tile in dict.fromkeys(tile for tiles in _few_rows_tiles.CANDIDATES.values() for tile in tiles)]


@pytest.mark.parametrize("splits", [None, 4])
@pytest.mark.parametrize(("tile",), _few(GEMM), ids=str)  # noqa: PT006
def test_every_tile_of_products_of_few_rows(tile: Any, splits: int | None, device: torch.device) -> None:
    x, weight, exact, inside = _products(20, 1032, 200)
    run: Any = few_rows_gemm.few_rows_gemm
    found = forced(lambda tile: run(x.to(device), weight.to(device), splits=splits, tile=tile), tile).cpu()
    assert_within(found if splits is None else found.sum(0), exact, inside)


GEMV = [
    (inner, tile)
    for inner in (576, 4096)
    for tile in dict.fromkeys((*gemv.candidates(inner, 4, swiglu=False), *gemv.candidates(inner, 2, swiglu=False)))
]


@pytest.mark.parametrize(("inner", "tile"), _few(GEMV), ids=str)
def test_every_tile_of_products_of_one_row(inner: int, tile: Any, device: torch.device) -> None:
    x, weight, exact, inside = _products(1, inner, 70)
    found = forced(lambda tile: gemv.gemv(x.to(device), weight.to(device), tile=tile), tile).cpu()
    assert_within(found, exact, inside)


def test_a_choice_that_drops_a_tile_of_keys_is_convicted(device: torch.device) -> None:
    step = make_step((129,), (1,), heads=(4, 1), head_dim=64, dtype=IEEE, device=device)
    head_dim, tile = DECODE[0]
    assert head_dim == 64
    fewer = replace(step, lengths=(128,))
    with pytest.raises(AssertionError):
        assert_attends(decode(fewer, step.pool.clone(), tile=tile, split=128), step)
