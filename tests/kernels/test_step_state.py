"""Gathering a step from the device's state and committing it: integers, so equal to plain torch or wrong."""

from dataclasses import fields, replace

import pytest
import torch

from weft.errors import KernelError
from weft.kernels import commit_step, gather_step
from weft.kernels.gather_step import StateTensors

ROWS, LONGEST, BLOCK_SIZE = 5, 2400, 4


def state_on(device: torch.device) -> StateTensors:
    """Rows 0 to 4, the last of them scratch; every number in it different from its neighbours."""
    columns = -(-LONGEST // BLOCK_SIZE)
    return StateTensors(
        token_ids=torch.randint(1, 10**9, (ROWS, LONGEST), device=device),
        num_computed_tokens=torch.tensor([3, 0, 900, 130, 0], device=device),  # 900: in more blocks than BLOCK
        block_table=torch.randperm(ROWS * columns, device=device).view(ROWS, columns) + 2**33,
        temperatures=torch.rand(ROWS, device=device),
        top_k=torch.randint(0, 2**31, (ROWS,), device=device),
        top_p=torch.rand(ROWS, device=device),
        min_p=torch.rand(ROWS, device=device),
        seeds=torch.randint(-(2**63), 2**63 - 1, (ROWS,), device=device),
        num_steps=torch.tensor([6], device=device),
        block_size=BLOCK_SIZE,
    )


def copy_of(state: StateTensors) -> StateTensors:
    tensors = {item.name: getattr(state, item.name) for item in fields(state) if item.name != "block_size"}
    return replace(state, **{name: tensor.clone() for name, tensor in tensors.items()})


CASES = {
    "decode": ([2, 0, 3], [1, 1, 1], 3),
    "decode with padding": ([2, 4, 4], [1, 1, 1], 3),
    "one": ([1], [1], 1),
    "chunks, decodes and padding": ([1, 2, 3, 0, 4], [517, 1, 300, 2, 0], 1024),
    "more tokens and padding than all programs take at once": ([1, 4], [2300, 0], 4500),
    "padding that starts within a program's piece": ([1, 4], [130, 0], 131),
}


@pytest.mark.parametrize("block", [None, 8])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_gathered_as_plain_torch_gathers_it(
    case: str, block: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """block: of so few tokens that every loop takes several turns."""
    if block is not None:
        monkeypatch.setattr(gather_step, "BLOCK", block)
        monkeypatch.setattr(gather_step, "_MOST_COLUMNS", 2)
    rows, counts, num_tokens = CASES[case]
    state = state_on(device)
    other = copy_of(state)
    row_tensor = torch.tensor(rows, device=device)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], device=device)
    found = gather_step.gather_step(state, row_tensor, starts, num_tokens)
    expected = gather_step.reference(other, row_tensor, starts, num_tokens)
    for item in fields(found):
        got, wanted = getattr(found, item.name), getattr(expected, item.name)
        if item.name == "block_tables":
            for request, length in enumerate(expected.sequence_lengths.tolist()):
                used = -(-length // BLOCK_SIZE)
                assert torch.equal(got[request, :used], wanted[request, :used]), item.name
        else:
            assert torch.equal(got, wanted), item.name
    assert state.num_steps.item() == other.num_steps.item() == 7


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 4, 1, 4]], ids=["full", "padded"])
def test_a_step_is_committed_as_plain_torch_commits_it(rows: list[int], device: torch.device) -> None:
    state = state_on(device)
    other = copy_of(state)
    row_tensor = torch.tensor(rows, device=device)
    lengths = torch.tensor([4, 1, LONGEST, 9], device=device)  # the third has no place left for its token
    sampled = torch.tensor([11, -1, 13, 14], device=device)
    keeps = torch.tensor([True, True, True, False], device=device)
    logs = [torch.zeros(4, 6, dtype=torch.int64, device=device) for _ in range(2)]
    commit_step.commit_step(state, row_tensor, lengths, sampled, keeps, logs[0])
    commit_step.reference(other, row_tensor, lengths, sampled, keeps, logs[1])
    for item in fields(state):
        if item.name != "block_size":
            assert torch.equal(getattr(state, item.name), getattr(other, item.name)), item.name
    assert torch.equal(logs[0], logs[1])
    assert logs[0][2].tolist() == [11, -1, 13, 14, 0, 0]  # of the sixth step, in a log of four


@pytest.mark.gpu
def test_the_log_may_be_memory_of_the_host(device: torch.device) -> None:
    state = state_on(device)
    log = torch.zeros(4, 6, dtype=torch.int64, pin_memory=True)
    ones = torch.ones(2, dtype=torch.int64, device=device)
    commit_step.commit_step(state, ones, ones, ones * 17, ones.bool(), log)
    torch.cuda.synchronize()
    assert log[2].tolist() == [17, 17, 0, 0, 0, 0]


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    state = state_on(device)
    whole = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(KernelError, match="query_starts"):
        gather_step.gather_step(state, whole, whole, 2)
    with pytest.raises(KernelError, match=r"rows is torch\.int32"):
        gather_step.gather_step(state, whole.int(), torch.zeros(3, dtype=torch.int64, device=device), 2)
    log = torch.zeros(4, 1, dtype=torch.int64, device=device)
    with pytest.raises(KernelError, match="room for 2"):
        commit_step.commit_step(state, whole, whole, whole, whole.bool(), log)
    with pytest.raises(KernelError, match=r"keeps is torch\.int64"):
        commit_step.commit_step(state, whole, whole, whole, whole, log)
