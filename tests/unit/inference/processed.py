"""Logits processed as an engine's runner does it, without an engine: rows of tokens, and what each asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.config import BlockGeometry, Limits
from weft.inference.device_state import DeviceState
from weft.inference.plan import Admission, StepPlan
from weft.inference.processing import Processing
from weft.inference.sampling_params import SamplingParams

ROWS, LONGEST = 8, 64


@dataclass
class Asked:
    """A request with these tokens, the first `num_prompt_tokens` of them its prompt, and what it asks for."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    params: dict[str, Any] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()


def plan_of(asked: Sequence[Asked]) -> StepPlan:
    """A step in which all of them join and compute their last token. Rows are taken from the last on."""
    rows = tuple(reversed(range(ROWS - len(asked), ROWS)))
    return StepPlan(
        request_ids=tuple(map(str, rows)),
        rows=rows,
        num_new_tokens=(1,) * len(asked),
        num_logit_rows=(1,) * len(asked),
        admissions=tuple(
            Admission(
                row=row,
                token_ids=tuple(one.token_ids),
                num_computed_tokens=len(one.token_ids) - 1,
                params=SamplingParams(**{"max_tokens": None} | one.params),
                seed=row,
                num_prompt_tokens=one.num_prompt_tokens,
                stop_token_ids=one.stop_token_ids,
            )
            for row, one in zip(rows, asked, strict=True)
        ),
    )


def state_of(device: str = "cpu") -> DeviceState:
    limits = Limits(max_num_seqs=ROWS, max_num_batched_tokens=LONGEST, max_model_len=LONGEST)
    geometry = BlockGeometry(num_blocks=ROWS, block_size=LONGEST, shareable=True)
    state = DeviceState(limits, geometry, torch.device(device))
    state.token_ids.random_(0, 5)  # what others left: nobody may look at it
    return state


def processed(asked: Sequence[Asked], logits: Tensor, processing_of: Any = Processing) -> Tensor:
    """Row i of the logits belongs to request i. processing_of: the class, with or without a fault."""
    state, plan = state_of(), plan_of(asked)
    processing = processing_of(state)
    state.apply(plan)
    processing.apply(plan)
    if not processing.concerns(plan):
        return logits
    lengths = torch.tensor([len(one.token_ids) for one in asked])
    return processing(plan, logits, lengths, row_each=False)
