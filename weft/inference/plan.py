"""What the scheduler decides for one step, in columns. Plain Python: it crosses to the device side as a whole."""

from dataclasses import dataclass
from typing import NamedTuple

from weft.inference.sampling_params import SamplingParams


class Admission(NamedTuple):
    """A request that takes a row in this step. `token_ids` are all it has: prompt, and output after a preemption.

    stop_token_ids: every id that ends it, which min_tokens holds back.
    """

    row: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    stop_token_ids: frozenset[int] = frozenset()


class NewBlocks(NamedTuple):
    """Blocks appended to a row's table, from column `first` on."""

    row: int
    first: int
    blocks: tuple[int, ...]


class PromptRows(NamedTuple):
    """New tokens of one request, of a prompt whose logprobs are wanted, and the tokens that are known to follow them.

    column: the request's, in the plan.
    first: of its new tokens, from which on each wants the logprob of its successor.
    num_top: how many of the most likely tokens are wanted beside each; -1 is all.
    """

    column: int
    first: int
    next_token_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step. Column i of the first four belongs to one request; there is no phase: prefill has many new tokens.

    num_new_tokens: an upper bound on what the step computes for the request.
    num_logit_rows: how many of its last new tokens want logits; 0 for a chunk that stops short of the request's end.
    new_blocks: for each cache group, what its block tables gain before the step.
    block_copies: (source, target) blocks to copy before the step.
    preempted_ids: requests that lost row and blocks in making this plan.
    prompt_rows: what of prompts is to be scored, for those who ask.
    """

    request_ids: tuple[str, ...]
    rows: tuple[int, ...]
    num_new_tokens: tuple[int, ...]
    num_logit_rows: tuple[int, ...]
    admissions: tuple[Admission, ...] = ()
    new_blocks: tuple[tuple[NewBlocks, ...], ...] = ((),)
    block_copies: tuple[tuple[int, int], ...] = ()
    preempted_ids: tuple[str, ...] = ()
    prompt_rows: tuple[PromptRows, ...] = ()
