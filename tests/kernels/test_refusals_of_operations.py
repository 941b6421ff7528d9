"""What no small operation, no operation of training and no state of a step can take is a KernelError that names it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.errors import KernelError
from weft.kernels import few_rows_gemm as few
from weft.kernels import gemv as one
from weft.kernels._jit import interpreting
from weft.kernels.add_norm import add_norm
from weft.kernels.commit_step import commit_step
from weft.kernels.cross_entropy import _CrossEntropy, cross_entropy
from weft.kernels.embedding import embedding
from weft.kernels.few_rows_gemm import few_rows_gemm
from weft.kernels.flash_attention import flash_attention
from weft.kernels.gather_step import StateTensors, StepTensors, gather_step
from weft.kernels.gemv import Norm, gemv
from weft.kernels.sample import sample
from weft.kernels.silu_multiply import silu_multiply
from weft.kernels.truncate import thresholds

Attempts = dict[str, Callable[[], object]]
EPSILONS = {"nan": math.nan, "-1.0": -1.0, "inf": math.inf}


def _refused(attempts: Attempts) -> None:
    for message, attempt in attempts.items():
        with pytest.raises(KernelError, match=message):
            attempt()


def test_what_is_no_sum_and_norm_is_named(device: torch.device) -> None:
    x, weight = torch.randn(2, 16, device=device), torch.ones(16, device=device)
    _refused(
        {
            r"addend has shape \(16,\)": lambda: add_norm(x[0], None, weight, 1e-5),
            r"addend has shape \(1, 1, 2, 16\)": lambda: add_norm(x[None, None], None, weight, 1e-5),
            r"addend has shape \(0, 2, 16\)": lambda: add_norm(x.new_zeros(0, 2, 16), None, weight, 1e-5),
            "weight is torch.float64": lambda: add_norm(x.double(), None, weight.double(), 1e-5),
            "weight is torch.int32": lambda: add_norm(x.int(), None, weight.int(), 1e-5),
            "weight lies on meta": lambda: add_norm(x, None, weight.to("meta"), 1e-5),
            "residual lies on meta": lambda: add_norm(x, x.to("meta"), weight, 1e-5),
        }
    )
    for name, epsilon in {**EPSILONS, "True": True, "'1e-5'": "1e-5"}.items():
        _refused({f"epsilon={name}": lambda epsilon=epsilon: add_norm(x, None, weight, epsilon)})
    assert add_norm(x[:, :0], None, weight[:0], 1e-5)[1].shape == (2, 0)


def test_what_is_no_product_of_few_rows_is_named(device: torch.device) -> None:
    x, weight = torch.randn(2, 16, device=device), torch.randn(6, 16, device=device)
    beside = torch.randn(97, device=device)[1:].view(6, 16)
    tile = few.Tile(block_n=16, block_k=32, num_warps=4, num_stages=2)
    for run in (gemv, few_rows_gemm):
        _refused(
            {
                "float64": lambda run=run: run(x.double(), weight.double()),
                r"\(2, 0\)": lambda run=run: run(x[:, :0].contiguous(), weight[:, :0].contiguous()),
                "weight lies on meta": lambda run=run: run(x, weight.to("meta")),
            }
        )
    _refused(
        {
            "x is torch.int32": lambda: gemv(x.int(), weight.int()),
            "x has stride 2": lambda: gemv(torch.randn(16, 2, device=device).T, weight),
            "bias lies on meta": lambda: gemv(x, weight, bias=torch.zeros(6, device="meta")),
            "residual lies on meta": lambda: gemv(x, weight, residual=torch.zeros(2, 6, device="meta")),
            "block_n=3": lambda: gemv(x, weight, tile=one.Tile(block_n=3, num_warps=4)),
            "block_n=0": lambda: gemv(x, weight, tile=one.Tile(block_n=0, num_warps=4)),
            "weight begins 4 bytes": lambda: few_rows_gemm(x, beside),
            "x begins 4 bytes": lambda: few_rows_gemm(beside, weight),
            "splits=0": lambda: few_rows_gemm(x, weight, splits=0),
            "splits=2.5": lambda: few_rows_gemm(x, weight, splits=2.5),  # type: ignore[arg-type]
            "block_n=24": lambda: few_rows_gemm(x, weight, tile=replace(tile, block_n=24)),
            "block_k=0": lambda: few_rows_gemm(x, weight, tile=replace(tile, block_k=0)),
        }
    )
    for name, epsilon in EPSILONS.items():
        norm = Norm(weight=torch.ones(16, device=device), epsilon=epsilon)
        _refused({f"epsilon={name}": lambda norm=norm: gemv(x, weight, norm=norm)})


def test_what_cannot_be_sampled_or_gated_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, warm = torch.randn(2, 8, device=device), torch.ones(2, device=device)
    whole = torch.zeros(2, dtype=torch.int64, device=device)
    _refused(
        {
            "logits is torch.float64": lambda: sample(logits.double(), warm, whole, whole),
            "temperatures lies on meta": lambda: sample(logits, warm.to("meta"), whole, whole),
            "seeds lies on meta": lambda: sample(logits, warm, whole.to("meta"), whole),
            "gate_up is torch.float64": lambda: silu_multiply(logits.double()),
            "gate_up lies on meta": lambda: silu_multiply(logits.to("meta")),
        }
    )
    monkeypatch.setenv("WEFT_DEBUG", "1")
    for name in ("nan", "-1.0", "inf"):
        wrong = torch.tensor([1.0, float(name)], device=device)
        _refused({rf"temperatures\[1\]={name}": lambda wrong=wrong: sample(logits, wrong, whole, whole)})
    assert sample(logits, warm, whole, whole).shape == (2,)
    assert sample(logits[:0], warm[:0], whole[:0], whole[:0]).shape == (0,)


@pytest.mark.skipif(not interpreting(), reason="only Triton's interpreter computes bfloat16 wrongly")
def test_bfloat16_in_the_interpreter_is_refused_and_never_wrong() -> None:
    x, weight, ids = torch.randn(2, 16).bfloat16(), torch.ones(16).bfloat16(), torch.zeros(2, dtype=torch.int64)
    dense = x.view(1, 2, 1, 16)
    for attempt in (
        lambda: add_norm(x, None, weight, 1e-5),
        lambda: gemv(x, x),
        lambda: few_rows_gemm(x, x),
        lambda: silu_multiply(x),
        lambda: sample(x, torch.ones(2), ids, ids),
        lambda: thresholds(x, torch.ones(2), ids, torch.ones(2), torch.zeros(2)),
        lambda: embedding(x, ids),
        lambda: cross_entropy(x, x, ids),
        lambda: flash_attention(dense, dense, dense),
    ):
        _refused({"bfloat16, which Triton's interpreter": attempt})


def test_targets_outside_the_vocabulary_are_named_or_make_the_loss_nan(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head = torch.randn(4, 16, device=device), torch.randn(12, 16, device=device)
    monkeypatch.setenv("WEFT_DEBUG", "1")
    for wrong in (12, -1, 2**40):
        targets = torch.tensor([0, -100, wrong, 3], device=device)
        _refused({rf"targets\[2\]={wrong} is outside 0\.\.11": lambda t=targets: cross_entropy(hidden, head, t)})
        leaf = hidden.detach().requires_grad_()
        loss = _CrossEntropy.apply(leaf, head, targets, 4)  # unchecked, as on a GPU
        gradient = torch.autograd.grad(loss, leaf)[0]
        assert loss.isnan()
        assert gradient[2].isnan().all()
        assert gradient[[0, 1, 3]].isfinite().all()
    whole = targets.clamp(0, 11)
    _refused(
        {
            "hidden is torch.float64": lambda: cross_entropy(hidden.double(), head.double(), whole),
            "hidden is torch.int32": lambda: cross_entropy(hidden.int(), head.int(), whole),
            "head lies on meta": lambda: cross_entropy(hidden, head.to("meta"), whole),
            "targets lies on meta": lambda: cross_entropy(hidden, head, whole.to("meta")),
            "empty vocabulary": lambda: cross_entropy(hidden, head[:0], whole),
            "chunk=2.5": lambda: cross_entropy(hidden, head, whole, chunk=2.5),  # type: ignore[arg-type]
        }
    )
    assert cross_entropy(hidden[:0], head, whole[:0]).isnan(), "the mean of nothing"
    _refused({"weight is torch.float64": lambda: embedding(head.double(), whole)})


def test_what_training_attention_cannot_take_is_named(device: torch.device) -> None:
    query, key = torch.randn(1, 4, 4, 16, device=device), torch.randn(1, 4, 2, 16, device=device)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    row = query[0], key[0], key[0]
    single = torch.tensor(1.0, device=device)
    _refused(
        {
            r"query has shape \[\]": lambda: flash_attention(single, single, single),
            "head dimension 0": lambda: flash_attention(query[..., :0], key[..., :0], key[..., :0]),
            "scale is nan": lambda: flash_attention(query, key, key, scale=math.nan),
            "scale is '1'": lambda: flash_attention(query, key, key, scale="1"),  # type: ignore[arg-type]
            "causal is 'no'": lambda: flash_attention(query, key, key, causal="no"),  # type: ignore[arg-type]
            "key is torch.float32 on meta": lambda: flash_attention(query, key.to("meta"), key),
            "query_starts lies on meta": lambda: flash_attention(*row, query_starts=starts.to("meta")),
            r"query_starts is .* strides \(2,\)": lambda: flash_attention(
                *row, query_starts=starts.repeat_interleave(2)[::2]
            ),
        }
    )
    for tensors in ((query[:0], key[:0], key[:0]), (query[:, :0], key[:, :0], key[:, :0])):
        assert flash_attention(*tensors)[0].shape == tensors[0].shape


def _state(device: torch.device, **given: Any) -> StateTensors:
    def whole(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    state = StateTensors(
        token_ids=whole(5, 100),
        num_computed_tokens=whole(5),
        block_table=whole(5, 25),
        temperatures=torch.zeros(5, device=device),
        top_k=whole(5),
        top_p=torch.ones(5, device=device),
        min_p=torch.zeros(5, device=device),
        seeds=whole(5),
        num_steps=whole(1),
        block_size=4,
    )
    return replace(state, **given)


def _gather(state: StateTensors, rows: list[int], starts: list[int], num_tokens: int) -> StepTensors:
    given = [torch.tensor(values, dtype=torch.int64, device=state.token_ids.device) for values in (rows, starts)]
    return gather_step(state, given[0], given[1], num_tokens)


def _commit(state: StateTensors, rows: list[int], lengths: list[int], log: Tensor | None = None) -> None:
    device = state.token_ids.device
    given = [torch.tensor(values, dtype=torch.int64, device=device) for values in (rows, lengths)]
    kept = torch.ones(len(rows), dtype=torch.bool, device=device)
    entries = torch.zeros(4, 6, dtype=torch.int64, device=device) if log is None else log
    commit_step(state, given[0], given[1], given[0], kept, entries)


def test_a_state_of_another_kind_is_named(device: torch.device) -> None:
    for message, given in {
        "token_ids is torch.int32": {"token_ids": torch.zeros(5, 100, dtype=torch.int32, device=device)},
        r"token_ids and block_table have shapes \(5,\)": {"token_ids": _state(device).seeds},
        # Rows of a wider table would be written as far apart as they are read, past the end of the step's own.
        r"block_table is .* not a contiguous": {"block_table": _state(device).token_ids[:, :25]},
        "block_table is torch.int32": {"block_table": torch.zeros(5, 25, dtype=torch.int32, device=device)},
        "num_computed_tokens is torch.int64": {"num_computed_tokens": _state(device).token_ids[:, 0]},
        "temperatures is torch.float64": {"temperatures": torch.zeros(5, device=device).double()},
        "top_k is torch.int32": {"top_k": _state(device).top_k.int()},
        "top_p is torch.float64": {"top_p": _state(device).top_p.double()},
        r"min_p is torch.float32 \(3,\)": {"min_p": _state(device).min_p[:3]},
        r"seeds is torch.int64 \(3,\)": {"seeds": _state(device).seeds[:3]},
        r"num_steps is torch.int64 \(\)": {"num_steps": torch.tensor(6, device=device)},
        "seeds lies on meta": {"seeds": _state(torch.device("meta")).seeds},
        "block_size=0": {"block_size": 0},
    }.items():
        state = _state(device, **given)
        _refused({message: lambda state=state: _gather(state, [0, 1], [0, 1, 2], 2)})
        _refused({message: lambda state=state: _commit(state, [0, 1], [4, 1])})
    _refused({"num_tokens=-1": lambda: _gather(_state(device), [0], [0, 1], -1)})
    _refused({r"rows is torch.int64 \(\), not": lambda: gather_step(_state(device), *_state(device).seeds[:2], 2)})
    one = _state(device).seeds[0]
    _refused({r"rows is torch.int64 \(\), not": lambda: commit_step(_state(device), one, one, one, one > 0, one)})
    _refused(
        {r"log is torch.int64 \(0, 6\)": lambda: _commit(_state(device), [0], [4], _state(device).token_ids[:0, :6])}
    )
    _refused(
        {
            "log lies on meta": lambda: _commit(
                _state(device), [0], [4], torch.zeros(4, 6, dtype=torch.int64, device="meta")
            )
        }
    )


def test_rows_and_tokens_that_do_not_exist_are_named_in_debug_mode(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "1")
    state = _state(device)
    _refused(
        {
            r"rows\[1\]=77 is outside 0\.\.4": lambda: _gather(state, [0, 77], [0, 1, 2], 2),
            r"query_starts\[2\]=9 is beyond the step's 2": lambda: _gather(state, [0, 1], [0, 1, 9], 2),
            "query_starts falls from 2 to 1": lambda: _gather(state, [0, 1], [0, 2, 1], 2),
            r"lengths after the step\[0\]=101": lambda: _gather(state, [0], [0, 101], 101),
            r"rows\[0\]=-1": lambda: _commit(state, [-1], [4]),
            r"sequence_lengths\[0\]=-5": lambda: _commit(state, [0], [-5]),
        }
    )
    assert _gather(state, [0, 4], [0, 1, 1], 2).slots.tolist() == [0, -1]
    _commit(state, [0, 4], [1, 0])
    _commit(state, [], [])


def test_more_padding_requests_than_tokens_leave_no_token_unmarked(device: torch.device) -> None:
    """Programs follow from how many tokens one request can have at most; they must not be none."""
    step = _gather(_state(device), [4] * 300, [0] * 301, 3)
    assert step.slots.tolist() == [-1] * 3
    assert step.token_ids.tolist() == step.positions.tolist() == [0] * 3
    assert step.last_tokens.tolist() == [0] * 300
    assert _gather(_state(device), [], [0], 3).slots.tolist() == [-1] * 3
