"""Paged decode against float64: every geometry, length and layout; and faults planted in it, each of them convicted."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_step import (
    LAYER,
    Step,
    assert_attends,
    assert_many_by_the_rule,
    assert_pool_equals,
    decode,
    in_the_last_columns,
    make_step,
    prefill,
    truth,
)
from weft.errors import KernelError
from weft.kernels import _paged_decode_tiles, paged_decode
from weft.kernels._paged_decode_tiles import programs_of, usual_programs

DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
P = 16
EDGES = (1, P - 1, P, P + 1, 4 * P + 5)  # the last one spans several splits of 32


def check(step: Step, **options: Any) -> Tensor:
    options = {"split": 32, "tile": paged_decode.Tile(block_n=16, num_warps=4, num_stages=2)} | options
    pool = step.pool.clone()
    found = decode(step, pool, **options)
    exact, expected = truth(step)
    assert_attends(found, step, exact)
    assert_pool_equals(pool, expected, step.pool)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": (4, 4)},
        {"heads": (9, 3), "norm": True},
        {"heads": (20, 1)},  # more query heads a key head than a tile has rows
        {"head_dim": 80, "heads": (2, 1)},
        {"head_dim": 96, "heads": (2, 1), "norm": True},
        {"head_dim": 10},
        {"window": 1},
        {"window": P},
        {"window": P + 5, "soft_cap": 2.0},
        {"soft_cap": 30.0},
        {"magnitude": 12.0},
        {"shared_blocks": 1},
    ],
    ids=str,
)
def test_every_length_at_the_edges_of_blocks_and_splits(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    lengths = EDGES if not options.get("shared_blocks") else (P + 1, 2 * P, 3 * P + 5)
    check(make_step(lengths, (1,) * len(lengths), block_size=P, dtype=dtype, device=device, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_of_many_steps_stay_within_torchs(dtype: torch.dtype, device: torch.device) -> None:
    options: list[dict[str, Any]] = [{}, {"norm": True}, {"window": 30}]
    steps = [
        make_step((60, 75, 90, 130), (1,) * 4, heads=(16, 1), head_dim=64, dtype=dtype, device=device, **option)
        for option in options
    ]
    assert_many_by_the_rule(lambda step: decode(step, step.pool.clone(), split=64), steps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_of_the_widest_heads_under_a_soft_cap_stay_within_torchs(
    dtype: torch.dtype, device: torch.device
) -> None:
    """In float32 on a GPU, which is no low precision, the bound of roundings alone holds: its exp2 is off by 2 units
    and a sum of products is taken one by one there, where the library's is cut (RMS 9.3e-8 against 4.4e-8, H200).
    """
    options: dict[str, Any] = {"heads": (4, 1), "head_dim": 256, "soft_cap": 30.0}
    steps = [make_step((60, 75, 90, 130), (1,) * 4, dtype=dtype, device=device, **options) for _ in range(3)]
    if dtype == torch.float32 and device.type == "cuda":
        for step in steps:
            assert_attends(decode(step, step.pool.clone(), split=64), step)
    else:
        assert_many_by_the_rule(lambda step: decode(step, step.pool.clone(), split=64), steps)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 256])
def test_the_last_columns_count(head_dim: int, device: torch.device) -> None:
    check(in_the_last_columns((33, 5), (1, 1), head_dim, device))


def test_columns_that_are_left_out_are_convicted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    step = in_the_last_columns((33, 5), (1, 1), 80, device)
    monkeypatch.setattr(paged_decode, "padded_head_dim", lambda head_dim: 64)
    found = decode(step, step.pool.clone(), split=32, tile=paged_decode.Tile(block_n=16, num_warps=4, num_stages=2))
    with pytest.raises(AssertionError):
        assert_attends(found, step)


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 64, 128])
def test_any_block_size(block_size: int, device: torch.device) -> None:
    lengths = tuple(sorted({max(1, block_size - 1), block_size, block_size + 1, 40}))
    check(make_step(lengths, (1,) * len(lengths), block_size=block_size, device=device))


def test_one_long_among_many_short(device: torch.device) -> None:
    lengths = (3, 1, 300, 2, 1, 17)
    check(make_step(lengths, (1,) * len(lengths), heads=(2, 1), device=device))


def test_a_long_sequence_is_cut_into_bigger_splits_and_no_more_of_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (paged_decode, _paged_decode_tiles):
        monkeypatch.setattr(module, "MOST_SPLITS", 3)
    check(make_step((33, 96, 97, 230), (1,) * 4, heads=(2, 1), device=device))


def test_all_keys_in_one_part(device: torch.device) -> None:
    step = make_step(EDGES, (1,) * len(EDGES), device=device)
    check(step, split=256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_number_of_programs_and_batch_mates_never_change_a_bit(dtype: torch.dtype, device: torch.device) -> None:
    step = make_step((5, 97, 33, 64), (1,) * 4, dtype=dtype, device=device)
    whole = check(step)
    assert torch.equal(check(step, programs=1), whole)
    for request in range(4):
        assert torch.equal(check(step.only(request)), whole[request : request + 1])


@pytest.mark.parametrize("options", [{}, {"window": 40, "soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging_in_registers_gives_the_bits_of_merging_parts(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """One program a head, runs of splits, or a program for each: also where the last split is the new key alone."""
    lengths = (1, 31, 32, 33, 64, 65, 97, 128, 129, 150)
    step = make_step(lengths, (1,) * len(lengths), **({"heads": (2, 1)} | options), dtype=dtype, device=device)
    given: dict[str, Any] = {"split": 32, "tile": paged_decode.Tile(block_n=16, num_warps=4, num_stages=2)}
    runs = []
    for programs in (1, 2 * len(lengths), 4 * len(lengths), 10**6):
        pool = step.pool.clone()
        runs.append((decode(step, pool, programs=programs, **given), pool.nan_to_num(nan=7.0)))
    exact, expected = truth(step)
    assert_attends(runs[0][0], step, exact)
    assert_pool_equals(pool, expected, step.pool)
    for found, left in runs[1:]:
        assert torch.equal(found, runs[0][0])
        assert torch.equal(left, runs[0][1])


def test_programs_follow_from_shapes() -> None:
    counts = (8, 64, 128, 129, 255, 256, 257, 512, 513, 4096)
    for num_warps, expected in ((4, [32, 4, 2, 2, 2, 1, 1, 1, 1, 1]), (1, [64, 8, 4, 3, 2, 2, 1, 1, 1, 1])):
        usual = [programs_of(heads, 128, usual_programs(heads, num_warps)) for heads in counts]
        assert usual == expected
    assert programs_of(8, 3, 512) == 3
    assert programs_of(8, 1, 512) == 1


def test_a_launch_counts_the_heads_of_all_requests_and_the_warps_of_its_tile(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head alone gets what keeps a GPU busy; whether there is more to lend follows from what can run at once."""
    asked: list[tuple[int, ...]] = []
    for name, answer in (("usual_programs", 12), ("lends", False)):

        def noted(*given: int, answer: int = answer) -> int:
            asked.append(given)
            return answer

        monkeypatch.setattr(_paged_decode_tiles, name, noted)
    step = make_step((5, 97, 33), (1,) * 3, heads=(40, 2), device=device)  # 20 that share keys are two tiles of 16
    check(step, split=32, tile=paged_decode.Tile(block_n=16, num_warps=1, num_stages=2))
    parts = 5  # of a table with room for nine blocks of 16
    assert asked == [(parts, 3, 9 * 16, 16), (2 * 2 * 3, 1)]


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the fault at the end, which reads what nobody wrote
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is what tells every address")
@pytest.mark.parametrize("programs", [1, 10**6])
@pytest.mark.parametrize("tile", [8, 16, 32])
@pytest.mark.parametrize("window", [None, 21])
def test_nothing_outside_tables_lengths_and_owned_slots_is_read_or_written(
    window: int | None, tile: int, programs: int, device: torch.device, accesses: Any, fenced: Any
) -> None:
    """Ragged lengths up to the table's very end: lookups run a tile ahead, and stop where the request does."""
    lengths = (1, 15, 16, 17, 33, 64, 80)
    step = make_step(lengths, (1,) * len(lengths), window=window, heads=(2, 1), device=device)
    tables = fenced(step.tables[:, :5])  # the longest fills its row
    pool, qkv, out = fenced(step.pool), step.qkv.clone(), fenced(torch.empty(len(lengths), 32))
    given = replace(step, tables=tables, qkv=qkv)
    paged = given.paged(pool)
    seen = accesses()
    paged_decode.paged_decode(
        qkv,
        paged,
        step.scoring,
        num_query_heads=2,
        new=step.new,
        out=out,
        split=32,
        tile=paged_decode.Tile(block_n=tile, num_warps=4, num_stages=2),
        programs=programs,
    )
    columns = torch.arange(5)
    oldest = torch.tensor([0 if window is None else max(0, length - window) for length in lengths])[:, None]
    used = (columns * P < torch.tensor(lengths)[:, None]) & ((columns + 1) * P > oldest)
    assert seen.elements(tables, "loads") <= set(used.flatten().nonzero().flatten().tolist())
    owned = (~truth(step)[1].isnan()).flatten().nonzero().flatten()
    assert seen.elements(pool, "loads") <= set((~step.pool.isnan()).flatten().nonzero().flatten().tolist())
    assert seen.elements(pool, "stores") <= set(owned.tolist())
    assert seen.elements(out, "stores") == set(range(out.numel()))
    tables[0, 1] = 0
    paged.sequence_lengths[0] += 2 * P  # longer than what it owns, as a lookup that does not stop would have it
    paged_decode.paged_decode(qkv, paged, step.scoring, num_query_heads=2, new=step.new, split=32, programs=programs)
    assert not seen.elements(tables, "loads") <= set(used.flatten().nonzero().flatten().tolist())


def test_requests_with_several_tokens_are_left_to_the_prefill(device: torch.device, guarded: Any) -> None:
    step = make_step((40, 21, 33), (1, 5, 1), device=device)
    alone = [check(step.only(request)) for request in (0, 2)]
    out, check_bands = guarded((7, 6 * 16), torch.float32)
    pool = step.pool.clone()
    decode(step, pool, split=32, out=out, tile=paged_decode.Tile(block_n=16, num_warps=4, num_stages=2))
    check_bands()
    assert out[1:6].isnan().all()
    assert torch.equal(out[:1], alone[0])
    assert torch.equal(out[6:], alone[1])


def test_a_slot_of_minus_one_writes_nothing_and_changes_no_result(device: torch.device) -> None:
    step = make_step(EDGES, (1,) * len(EDGES), device=device)
    kept = replace(step, new=replace(step.new, slots=torch.full_like(step.new.slots, -1)))
    pool = step.pool.clone()
    found = decode(kept, pool, split=32)
    assert torch.equal(pool.isnan(), step.pool.isnan())
    assert torch.equal(found, decode(step, step.pool.clone(), split=32))


def test_a_request_without_keys_attends_to_nothing(device: torch.device) -> None:
    step = make_step((5, 7), (1, 1), device=device)
    empty = replace(step, lengths=(0, 7))
    query = torch.randn(2, 6 * 16, device=device)
    for columns in (1, 40):  # one part, and several to merge
        tables = torch.nn.functional.pad(step.tables[:, :1], (0, columns - 1))
        paged = replace(empty.paged(truth(step)[1].float()), block_tables=tables)
        found = paged_decode.paged_decode(query, paged, step.scoring, num_query_heads=6)
        assert (found[0] == 0).all()
        assert found.isfinite().all()


def test_rows_sliced_from_a_wider_matrix(device: torch.device) -> None:
    step = make_step(EDGES, (1,) * len(EDGES), device=device)
    wide = torch.full((len(EDGES), step.qkv.shape[1] + 24), torch.nan, device=device)
    wide[:, 8:-16] = step.qkv
    sliced = replace(step, qkv=wide[:, 8:-16], tables=torch.nn.functional.pad(step.tables, (0, 3))[:, :-3])
    assert torch.equal(check(sliced), check(step))


@pytest.mark.parametrize("window", [None, 7])
def test_already_rotated_queries_find_the_same(window: int | None, device: torch.device) -> None:
    step = make_step(EDGES, (1,) * len(EDGES), window=window, device=device)
    pool = step.pool.clone()
    prefilled = prefill(step, pool)
    from weft.kernels.cache_write import rotate_and_write

    query = rotate_and_write(
        step.qkv, step.new.positions, step.new.slots, step.new.rotation, pool, LAYER, num_query_heads=6
    )
    found = paged_decode.paged_decode(query.flatten(1), step.paged(pool), step.scoring, num_query_heads=6, split=32)
    torch.testing.assert_close(found, check(step), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, prefilled, rtol=1e-5, atol=1e-6)


def test_a_window_shows_exactly_its_keys(device: torch.device) -> None:
    """Values that name their token: the mean over equal scores says which were seen."""
    window, lengths = 4, (1, 3, 4, 5, 9)
    step = make_step(lengths, (1,) * 5, window=window, device=device, heads=(1, 1))
    pool = step.pool.clone()
    pool[0] = 0.0
    for request, length in enumerate(lengths):
        for token in range(length):
            pool[1, LAYER, step.tables[request, token // P], token % P] = torch.eye(16, device=device)[token]
    query = torch.randn(5, 16, device=device)
    found = paged_decode.paged_decode(query, step.paged(pool), step.scoring, num_query_heads=1)
    for row, length in zip(found, lengths, strict=True):
        seen = torch.zeros(16, device=device)
        seen[max(0, length - window) : length] = 1 / min(window, length)
        torch.testing.assert_close(row, seen)


def _without_rescale(parts: Tensor, log_sums: Tensor, lengths: Tensor, starts: Tensor, out: Tensor, **_: Any) -> None:
    for request, length in enumerate(lengths.tolist()):
        out[request] = parts[request, :, : -(-length // 32)].mean(1).flatten()


def _inside(tables: Tensor) -> Tensor:
    """Entries past the end, which may hold anything, as blocks that exist: a fault must not crash."""
    return torch.where(tables == 2**30, 0, tables)


def _roll_heads(step: Step) -> Step:
    size = 6 * 16
    heads = step.qkv[:, :size].unflatten(1, (6, 16))[:, [0, 3, 1, 4, 2, 5]].flatten(1)
    return replace(step, qkv=torch.cat([heads, step.qkv[:, size:]], dim=1))


FAULTS: dict[str, Callable[[Step], Step]] = {
    "window one too wide": lambda step: replace(step, scoring=replace(step.scoring, window=12)),
    "window one too narrow": lambda step: replace(step, scoring=replace(step.scoring, window=10)),
    "table a column off": lambda step: replace(step, tables=_inside(step.tables.roll(1, dims=1))),
    "heads of groups mixed": _roll_heads,
    "position one too far": lambda step: replace(step, new=replace(step.new, positions=step.new.positions + 1)),
    "slot of a neighbour": lambda step: replace(step, new=replace(step.new, slots=step.new.slots ^ 1)),
    "soft cap forgotten": lambda step: replace(step, scoring=replace(step.scoring, soft_cap=None)),
    "scale one percent off": lambda step: replace(step, scoring=replace(step.scoring, scale=step.scoring.scale * 1.01)),
    "last key left out": lambda step: replace(step, lengths=tuple(length - 1 for length in step.lengths)),
}


@cache
def acquitted(window: int | None, soft_cap: float | None, device: torch.device) -> Step:
    """Of each kind one step, which passes without a fault."""
    step = make_step((37, 70, 90), (1, 1, 1), window=window, soft_cap=soft_cap, device=device)
    check(step)
    return step


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter, where a fault reads what nobody wrote
@pytest.mark.parametrize("fault", [*FAULTS, "merge without rescale", "slot -1 written", "blocks of another size"])
def test_every_planted_fault_is_convicted(fault: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    window = 11 if "window" in fault else None
    soft_cap = 1.5 if fault == "soft cap forgotten" else None
    step = acquitted(window, soft_cap, device)
    exact, expected = truth(step)
    faulty, pool = FAULTS.get(fault, lambda given: given)(step), step.pool.clone()
    view = pool
    if fault == "merge without rescale":
        monkeypatch.setattr(paged_decode, "merge_parts", _without_rescale)
    if fault == "slot -1 written":
        expected = step.pool  # what a step that writes nothing would leave
    if fault == "blocks of another size":
        faulty = replace(step, tables=torch.nn.functional.pad(_inside(step.tables), (0, 8)))
        view = pool.view(2, 2, pool.shape[2] * 2, P // 2, 2, 16)
    found = decode(faulty, view, split=32)

    def judge() -> None:
        assert_attends(found, step, exact)
        assert_pool_equals(pool, expected, step.pool)

    with pytest.raises(AssertionError):
        judge()


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    step = make_step((5, 9), (1, 1), device=device)
    paged = step.paged(step.pool)
    call: Any = lambda rows=step.qkv, paged=paged, scoring=step.scoring, heads=6, **options: paged_decode.paged_decode(  # noqa: E731
        rows, paged, scoring, num_query_heads=heads, new=step.new, **options
    )
    for message, attempt in {
        "float64": lambda: call(paged=replace(paged, pool=paged.pool.double())),
        "rows is torch.float16": lambda: call(rows=step.qkv.half()),
        "num_query_heads=5": lambda: call(heads=5),
        r"\[T_total, 128\]": lambda: call(heads=4),
        "layer=2": lambda: call(paged=replace(paged, layer=2)),
        "window=0": lambda: call(scoring=replace(step.scoring, window=0)),
        "soft_cap=-1": lambda: call(scoring=replace(step.scoring, soft_cap=-1.0)),
        "block_tables is torch.float32": lambda: call(paged=replace(paged, block_tables=paged.block_tables.float())),
        "query_starts shape": lambda: call(paged=replace(paged, query_starts=paged.query_starts[:-1])),
        r"block_tables\[1, 0\]=99": lambda: call(
            paged=replace(paged, block_tables=paged.block_tables.index_fill(0, torch.tensor(1, device=device), 99)),
            debug=True,
        ),
        "needs 63 blocks": lambda: call(
            paged=replace(paged, sequence_lengths=torch.tensor([1000, 9], device=device)), debug=True
        ),
        "head_dim=300": lambda: call(paged=replace(paged, pool=torch.zeros(2, 2, 4, 16, 2, 300, device=device))),
        "split=30": lambda: call(split=30),
        "out is": lambda: call(out=torch.empty(2, 5, device=device)),
    }.items():
        with pytest.raises(KernelError, match=message):
            attempt()
