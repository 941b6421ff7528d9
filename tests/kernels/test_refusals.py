"""What no kernel of a step can take is a KernelError that names it: never a wrong number, a crash or a bare exception.

What lies on the device is read back in debug mode only, as a step of serving waits for nothing.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_step import LAYER, Step, make_step, truth
from weft.errors import KernelError
from weft.kernels import merge_parts
from weft.kernels.cache_write import rotate_and_write
from weft.kernels.paged import PagedKeys
from weft.kernels.paged_decode import Tile, paged_decode
from weft.kernels.paged_prefill import Tile as PrefillTile
from weft.kernels.paged_prefill import paged_prefill

Run = Callable[..., Any]


def _decode(step: Step, **given: Any) -> Tensor:
    paged = replace(step.paged(step.pool.clone()), **given.pop("paged", {}))
    new = replace(step.new, **given.pop("new", {}))
    new = replace(new, rotation=replace(new.rotation, **given.pop("rotation", {})))
    scoring = replace(step.scoring, **given.pop("scoring", {}))
    options = {"num_query_heads": step.num_query_heads} | given
    return paged_decode(options.pop("rows", step.qkv), paged, scoring, new=new, **options)


def _prefill(step: Step, **given: Any) -> Tensor:
    paged = replace(step.paged(truth(step)[1].float()), **given.pop("paged", {}))
    scoring = replace(step.scoring, **given.pop("scoring", {}))
    options = {"num_query_heads": step.num_query_heads} | given
    query = step.qkv[:, : step.num_query_heads * 16]
    return paged_prefill(options.pop("query", query), paged, scoring, **options)


def _write(step: Step, **given: Any) -> Tensor:
    new = step.new
    wanted = {"qkv": step.qkv, "positions": new.positions, "slots": new.slots, "pool": step.pool.clone()} | given
    rotation = replace(new.rotation, **wanted.pop("rotation", {}))
    return rotate_and_write(**({"layer": LAYER, "num_query_heads": 6, "rotation": rotation} | wanted))


def _refused(message: str, attempt: Callable[[], object]) -> None:
    with pytest.raises(KernelError, match=message):
        attempt()


NAN, INF = math.nan, math.inf
SMALL = {"num_warps": 4, "num_stages": 2}
SCORING: dict[str, dict[str, Any]] = {
    "window=0": {"window": 0},
    "window=2.5": {"window": 2.5},
    "window=nan": {"window": NAN},
    "window=True": {"window": True},
    "soft_cap=0.0": {"soft_cap": 0.0},
    "soft_cap=nan": {"soft_cap": NAN},
    "soft_cap=inf": {"soft_cap": INF},
    "scale=nan": {"scale": NAN},
    "scale=inf": {"scale": INF},
    "scale='1'": {"scale": "1"},
    "scale=None": {"scale": None},
    "scale=True": {"scale": True},
    "soft_cap='5'": {"soft_cap": "5"},
    "soft_cap=True": {"soft_cap": True},
}


@pytest.mark.parametrize("run", [_decode, _prefill])
@pytest.mark.parametrize("message", SCORING)
def test_what_makes_no_scores_is_named(message: str, run: Run, device: torch.device) -> None:
    step = make_step((5, 9), (1, 1), device=device)
    _refused(message, lambda: run(step, scoring=SCORING[message]))


POOLS: dict[str, tuple[int, ...]] = {
    r"\(2, 2, 4, 16, 0, 16\)": (2, 2, 4, 16, 0, 16),
    r"\(2, 2, 4, 0, 2, 16\)": (2, 2, 4, 0, 2, 16),
    r"\(2, 2, 0, 16, 2, 16\)": (2, 2, 0, 16, 2, 16),
    r"\(2, 2, 4, 16, 2, 0\)": (2, 2, 4, 16, 2, 0),
    "head_dim=15": (2, 2, 4, 16, 2, 15),
    "num_kv_heads=4": (2, 2, 4, 16, 4, 16),
}


@pytest.mark.parametrize("run", [_decode, _prefill, _write])
@pytest.mark.parametrize("message", POOLS)
def test_a_pool_that_holds_no_heads_is_named(message: str, run: Run, device: torch.device) -> None:
    step, pool = make_step((5, 9), (1, 1), device=device), torch.zeros(POOLS[message], device=device)
    _refused(message, lambda: run(step, **({"pool": pool} if run is _write else {"paged": {"pool": pool}})))


@pytest.mark.parametrize("run", [_decode, _prefill])
def test_tables_of_another_kind_or_place_are_named(run: Run, device: torch.device) -> None:
    step = make_step((5, 9), (1, 1), device=device)
    paged: PagedKeys = step.paged(step.pool)
    for message, given in {
        r"block_tables must be .* got shape \(\)": {"block_tables": torch.tensor(1, device=device)},
        r"block_tables must be .* got shape \(3,\)": {"block_tables": paged.block_tables[0]},
        "block_tables must be": {"block_tables": paged.block_tables.T.contiguous().T},
        "sequence_lengths has stride 2": {"sequence_lengths": torch.ones(4, dtype=torch.int64, device=device)[::2]},
        "block_tables lies on meta": {"block_tables": paged.block_tables.to("meta")},
        "sequence_lengths lies on meta": {"sequence_lengths": paged.sequence_lengths.to("meta")},
        "query_starts lies on meta": {"query_starts": paged.query_starts.to("meta")},
        "pool lies on meta": {"pool": step.pool.to("meta")},
        "layer=-1": {"layer": -1},
    }.items():
        _refused(message, lambda given=given: run(step, paged=given))
    for heads in (0, -6, 2.0):
        _refused(f"num_query_heads={heads}", lambda heads=heads: run(step, num_query_heads=heads))
    _refused("out lies on meta", lambda: run(step, out=torch.empty(2, 96, device="meta")))


@pytest.mark.parametrize("run", [_decode, _prefill])
def test_values_outside_the_pool_and_the_step_are_named_in_debug_mode(run: Run, device: torch.device) -> None:
    step = make_step((5, 9), (1, 1), device=device)
    tables = step.tables.clone()
    whole: Callable[[list[int]], Tensor] = lambda values: torch.tensor(values, device=device)  # noqa: E731
    for message, given in {
        r"block_tables\[1, 0\]=-1 ": {"block_tables": tables.index_fill(0, whole([1]), -1)},
        r"sequence_lengths\[0\]=5 needs 1 blocks": {"block_tables": tables[:, :0]},
        r"sequence_lengths\[0\]=-3": {"sequence_lengths": whole([-3, 9])},
        r"query_starts\[0\]=1": {"query_starts": whole([1, 2, 3])},
        r"query_starts\[2\]=6": {"query_starts": whole([0, 1, 6])},
        "query_starts falls from 2 to 1 at 1": {"query_starts": whole([0, 2, 1])},
        # As many rows as requests are read as one of each, whatever the starts say.
        r"query_starts\[1\]=0, where 2 rows of 2 requests": {"query_starts": whole([0, 0, 2])},
    }.items():
        _refused(message, lambda given=given: run(step, paged=given, debug=True))
    assert run(step, debug=True).isfinite().all()


def test_rotation_and_places_of_new_tokens_are_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step((5, 9), (1, 1), norm=True, device=device)
    new, rotation = step.new, step.new.rotation
    norm = rotation.key_norm
    assert norm is not None
    for message, given in {
        "query_epsilon=nan": {"query_epsilon": NAN},
        "query_epsilon=-1.0": {"query_epsilon": -1.0},
        "key_epsilon=inf": {"key_epsilon": INF},
        "cos lies on meta": {"cos": rotation.cos.to("meta")},
        "cos is torch.float64": {"cos": rotation.cos.double()},
        "sin is torch.int32": {"sin": rotation.sin.int()},
        "key_norm lies on meta": {"key_norm": norm.to("meta")},
        "key_norm is torch.float16": {"key_norm": norm.half()},
    }.items():
        for run in (_decode, _write):
            _refused(message, lambda run=run, given=given: run(step, rotation=given))
    monkeypatch.setenv("WEFT_DEBUG", "1")
    for message, given in {
        "positions lies on meta": {"positions": new.positions.to("meta")},
        r"positions\[0\]=10004 is outside 0\.\.9": {"positions": new.positions + 10_000},
        r"positions\[0\]=-6": {"positions": new.positions - 10},
        r"slots\[1\]=-2 is outside -1\.\.": {"slots": torch.tensor([-1, -2], device=device)},
        r"slots\[0\]=\d{7} ": {"slots": new.slots + 10**6},
    }.items():
        _refused(message, lambda given=given: _decode(step, new=given))
        _refused(message, lambda given=given: _write(step, **given))


def test_splits_programs_and_tiles_that_are_none_are_named(device: torch.device) -> None:
    step = make_step((5, 90), (1, 1), device=device)
    tile = Tile(block_n=16, **SMALL)
    for split in (0, -16, 24):
        _refused(f"split={split}", lambda split=split: _decode(step, split=split, tile=tile))
    for programs in (0, -1, 2.5):
        _refused(f"programs={programs}", lambda programs=programs: _decode(step, programs=programs))
    for size in (0, 24):
        _refused(f"block_n={size}", lambda size=size: _decode(step, split=48, tile=Tile(block_n=size, **SMALL)))
        _refused(
            f"block_m={size}", lambda size=size: _prefill(step, tile=PrefillTile(block_m=size, block_n=16, **SMALL))
        )
        _refused(
            f"block_n={size}", lambda size=size: _prefill(step, tile=PrefillTile(block_m=32, block_n=size, **SMALL))
        )
    # A split need not be a power of two: a multiple of the tile's keys is enough.
    torch.testing.assert_close(
        _decode(step, split=48, tile=tile, programs=10**6), _decode(step, split=32, tile=tile), rtol=1e-5, atol=1e-6
    )


def test_rows_of_another_kind_are_named(device: torch.device) -> None:
    step = make_step((5, 9), (1, 1), device=device)
    _refused(r"rows has shape \(160,\)", lambda: _decode(step, rows=step.qkv[0]))
    _refused("rows lies on meta", lambda: _decode(step, rows=step.qkv.to("meta")))
    _refused(r"query has shape \(\)", lambda: _prefill(step, query=step.qkv[0, 0]))
    _refused(r"qkv has shape \(160,\)", lambda: _write(step, qkv=step.qkv[0]))
    if device.type == "cpu":
        _refused("interpreter", lambda: _decode(step.to(torch.bfloat16)))


def test_a_step_without_requests_or_with_empty_ones_is_no_error(device: torch.device) -> None:
    step = make_step((5, 9), (1, 1), device=device)
    none = {"block_tables": step.tables[:0], "sequence_lengths": step.starts[:0], "query_starts": step.starts[:1]}
    assert _prefill(step, query=step.qkv[:0, :96], paged=none, debug=True).shape == (0, 96)
    found = paged_decode(
        step.qkv[:0, :96], replace(step.paged(step.pool), **none), step.scoring, num_query_heads=6, debug=True
    )
    assert found.shape == (0, 96)
    # A request without rows lies between two of one row and one of two: nobody writes for it.
    step = make_step((7, 9, 5), (1, 2, 1), device=device)
    starts = torch.tensor([0, 1, 1, 3, 4], device=device)
    padded = {
        "block_tables": step.tables[[0, 0, 1, 2]],
        "sequence_lengths": torch.tensor([7, 0, 9, 5], device=device),
        "query_starts": starts,
    }
    assert torch.equal(_prefill(step, paged=padded), _prefill(step))


def test_what_is_no_merge_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**given: Any) -> None:
        wanted: dict[str, Any] = {
            "parts": torch.zeros(1, 3, 2, 10, device=device),
            "log_sums": torch.zeros(1, 3, 2, device=device),
            "sequence_lengths": torch.tensor([6], device=device),
            "query_starts": torch.tensor([0, 1], device=device),
            "out": torch.zeros(1, 30, device=device),
        }
        merge_parts.merge_parts(**({"split": 4, "most_splits": 128} | wanted | given))

    for message, given in {
        r"parts has shape \(3, 2, 10\)": {"parts": torch.zeros(3, 2, 10, device=device)},
        r"out has shape \(1, 5\)": {"out": torch.zeros(1, 5, device=device)},
        "out is torch.float64": {"out": torch.zeros(1, 30, device=device).double()},
        "out lies on meta": {"out": torch.zeros(1, 30, device="meta")},
        "sequence_lengths is torch.float32": {"sequence_lengths": torch.ones(1, device=device)},
        r"sequence_lengths is torch.int64 \(2,\)": {"sequence_lengths": torch.tensor([6, 7], device=device)},
        r"query_starts is torch.int64 \(1,\)": {"query_starts": torch.tensor([0], device=device)},
        "split=0": {"split": 0},
        "most_splits=0": {"most_splits": 0},
        "window=0": {"window": 0},
    }.items():
        _refused(message, lambda given=given: run(**given))
    monkeypatch.setenv("WEFT_DEBUG", "1")
    run()
    _refused(r"sequence_lengths\[0\]=60 has 15 parts", lambda: run(sequence_lengths=torch.tensor([60], device=device)))
