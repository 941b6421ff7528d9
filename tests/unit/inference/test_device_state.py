"""The device state against rows in plain Python: what a batch holds, what a step leaves, nothing read back."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from weft import SamplingParams
from weft.batch import Batch
from weft.config import BlockGeometry, Limits
from weft.inference.device_state import DeviceState
from weft.inference.plan import Admission, NewBlocks, StepPlan

ROWS, S_MAX, NUM_BLOCKS = 4, 16, 64
LIMITS = Limits(max_num_seqs=ROWS, max_num_batched_tokens=64, max_model_len=S_MAX)


@dataclass
class Row:
    """One request as a reader would write it down."""

    tokens: list[int]
    temperature: float
    seed: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass
class Work:
    """What a plan gives one row: new tokens, and for how many of the last of them logits."""

    row: int
    count: int
    logits: int


def state_of(block_size: int, device: str = "cpu") -> DeviceState:
    geometry = BlockGeometry(num_blocks=NUM_BLOCKS, block_size=block_size, shareable=True)
    return DeviceState(LIMITS, geometry, torch.device(device))


def plan_of(
    rows: dict[int, Row], work: list[Work], admitted: set[int], free_blocks: list[int], block_size: int
) -> StepPlan:
    """The plan of this work; rows gain the blocks that it needs."""
    new_blocks = []
    for item in work:
        row = rows[item.row]
        held = len(row.blocks)
        row.blocks += [free_blocks.pop() for _ in range(-(-(row.computed + item.count) // block_size) - held)]
        if len(row.blocks) > held:
            new_blocks.append(NewBlocks(row=item.row, first=held, blocks=tuple(row.blocks[held:])))
    return StepPlan(
        request_ids=tuple(str(item.row) for item in work),
        rows=tuple(item.row for item in work),
        num_new_tokens=tuple(item.count for item in work),
        num_logit_rows=tuple(item.logits for item in work),
        admissions=tuple(
            Admission(
                row=index,
                token_ids=tuple(rows[index].tokens),
                num_computed_tokens=rows[index].computed,
                params=SamplingParams(temperature=rows[index].temperature),
                seed=rows[index].seed,
                num_prompt_tokens=1,
            )
            for index in admitted
        ),
        new_blocks=(tuple(new_blocks),),
    )


def check(batch: Batch, rows: dict[int, Row], work: list[Work], block_size: int) -> None:
    places = [(rows[i.row], rows[i.row].computed + offset) for i in work for offset in range(i.count)]
    ends = [sum(i.count for i in work[: place + 1]) for place in range(len(work))]
    sampled = [(rows[i.row], i, back) for i in work for back in reversed(range(i.logits))]
    assert batch.token_ids.tolist() == [row.tokens[position] for row, position in places]
    assert batch.positions.tolist() == [position for _, position in places]
    assert batch.query_starts.tolist() == [0, *ends]
    assert batch.sequence_lengths.tolist() == [rows[i.row].computed + i.count for i in work]
    assert batch.logit_rows.tolist() == [
        end - 1 - k for end, i in zip(ends, work, strict=True) for k in reversed(range(i.logits))
    ]
    (tables,) = batch.groups
    for table, item in zip(tables.block_tables.tolist(), work, strict=True):
        blocks = rows[item.row].blocks
        assert table[: len(blocks)] == blocks
    assert tables.slot_mapping.tolist() == [
        row.blocks[position // block_size] * block_size + position % block_size for row, position in places
    ]
    assert batch.sampling.positions.tolist() == [row.computed + i.count - back for row, i, back in sampled]
    assert batch.sampling.temperatures.tolist() == [row.temperature for row, _, _ in sampled]
    assert [seed % 2**64 for seed in batch.sampling.seeds.tolist()] == [row.seed for row, _, _ in sampled]
    assert batch.sampling.any_noise == any(row.temperature > 0 for row, _, _ in sampled)


@st.composite
def requests(draw: st.DrawFn) -> Row:
    tokens = draw(st.lists(st.integers(0, 96), min_size=1, max_size=S_MAX - 1))
    return Row(
        tokens, draw(st.sampled_from([0.0, 0.5, 1.0])), draw(st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]))
    )


@given(data=st.data(), block_size=st.sampled_from([1, 2, 3, 5, S_MAX]))
def test_a_batch_is_what_rows_in_plain_python_say(data: st.DataObject, block_size: int) -> None:
    state = state_of(block_size)
    rows: dict[int, Row] = {}
    free_blocks = data.draw(st.permutations(range(NUM_BLOCKS)))
    for _ in range(data.draw(st.integers(1, 5))):
        chosen = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1))
        # A row whose context is full, or that draws so, goes to another request.
        fresh = {i for i in chosen if i not in rows or len(rows[i].tokens) == S_MAX or data.draw(st.booleans())}
        for index in fresh:
            if index in rows:
                free_blocks = [*rows[index].blocks, *free_blocks]
            rows[index] = data.draw(requests())
            rows[index].computed = data.draw(st.integers(0, len(rows[index].tokens) - 1))  # a prefix found elsewhere
        work = []
        for index in chosen:
            left = len(rows[index].tokens) - rows[index].computed
            count = data.draw(st.integers(1, left))
            work.append(Work(index, count, data.draw(st.integers(1, count)) if count == left else 0))
        plan = plan_of(rows, work, fresh, free_blocks, block_size)
        state.apply(plan)
        batch = state.gather(plan)
        check(batch, rows, work, block_size)
        sampled = data.draw(
            st.lists(st.integers(-1, 96), min_size=len(batch.logit_rows), max_size=len(batch.logit_rows))
        )
        state.commit(plan, batch.sequence_lengths, torch.tensor(sampled, dtype=torch.int64))
        for item in work:
            row = rows[item.row]
            row.computed += item.count
            mine, sampled = sampled[: item.logits], sampled[item.logits :]
            row.tokens += [max(token, 0) for token in mine[-1:]]
        for index, row in rows.items():
            assert state.token_ids[index, : len(row.tokens)].tolist() == row.tokens
            assert state.num_computed_tokens[index] == row.computed


def ragged_step(state: DeviceState) -> Tensor:
    """A prefill, a chunk without logits and a decode, twice, as the runner does it; the second batch's tokens."""
    rows = {0: Row([5, 9, 2], 0.0, 1), 1: Row([4] * 8, 1.0, 2**64 - 1), 2: Row([7], 0.5, 2)}
    free_blocks = list(range(NUM_BLOCKS))
    for step in range(2):
        works = (
            [Work(0, 3, 1), Work(1, 4, 0), Work(2, 1, 1)]
            if step == 0
            else [Work(2, 1, 1), Work(1, 4, 1), Work(0, 1, 1)]
        )
        plan = plan_of(rows, works, {0, 1, 2} if step == 0 else set(), free_blocks, 4)
        state.apply(plan)
        batch = state.gather(plan)
        sampled = batch.logit_rows * 0 + 11
        state.commit(plan, batch.sequence_lengths, sampled)
        for item in works:
            rows[item.row].computed += item.count
    return batch.token_ids


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_building_a_batch_reads_nothing_back_from_the_device(device: str) -> None:
    with FakeTensorMode():
        assert ragged_step(state_of(4, device)).shape == (6,)


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.item, Tensor.nonzero, Tensor.__bool__])
def test_the_fake_device_sees_a_read_back(read: Callable[[Tensor], object]) -> None:
    with FakeTensorMode():
        state = state_of(4, "cuda")
        ragged_step(state)
        with pytest.raises(Exception, match=r"tolist|_local_scalar_dense|nonzero"):
            read(state.num_computed_tokens[0])


def test_a_step_takes_the_tokens_that_the_step_before_sampled() -> None:
    assert ragged_step(state_of(4)).tolist() == [11, 4, 4, 4, 4, 11]


def test_a_failed_row_keeps_a_valid_token_id() -> None:
    state = state_of(S_MAX)
    rows = {1: Row([5], 0.0, 0)}
    plan = plan_of(rows, [Work(1, 1, 1)], {1}, [0], S_MAX)
    state.apply(plan)
    state.commit(plan, state.gather(plan).sequence_lengths, torch.tensor([-1]))
    assert state.token_ids.min() >= 0
