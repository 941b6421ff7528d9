"""How likely tokens were: launched on a step's logits behind the step, read when its tokens are.

Rows come in pieces, so that no tensor holds the vocabulary for more than a few of them. Nothing here waits for a
device.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby, islice
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.inference.plan import StepPlan
from weft.inference.sampling_params import MAX_LOGPROBS
from weft.inference.token_logprobs import StepLogprobs, TokenLogprobs

ROWS_AT_ONCE = 128  # whose logits, logprobs and order exist at a time
ROWS_AT_ONCE_SORTED = 16  # where the whole vocabulary is asked for, in order: a sort takes several times its input


LogitsOf = Callable[[Int[Tensor, "_"]], Float[Tensor, "_ V"]]
Read = Callable[[], list[TokenLogprobs]]


class LogprobRows:
    """Which rows of the device's state want logprobs, and how many of the most likely tokens beside each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_top: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> None:
        """Take in who takes which row."""
        for admission in plan.admissions:
            self._num_top.pop(admission.row, None)
            if admission.params.logprobs is not None:
                self._num_top[admission.row] = admission.params.logprobs

    def wants(self, plan: StepPlan) -> bool:
        """Whether any request of the plan wants any. Rows of requests that have ended may still be listed."""
        if plan.prompt_rows or not self._num_top:
            return bool(plan.prompt_rows)
        return any(count and row in self._num_top for row, count in zip(plan.rows, plan.num_logit_rows, strict=True))

    def launch(
        self,
        plan: StepPlan,
        sampled: Int[Tensor, "R"],
        *,
        logits_of: LogitsOf,
        prompt_logits_of: LogitsOf | None = None,
        row_each: bool = False,
    ) -> Callable[[], StepLogprobs]:
        """Start scoring what the plan's requests want; what is returned reads it once the step is known to be done.

        sampled, logits_of: a row for each logit row of the plan.
        prompt_logits_of: logits of some of its new tokens, if any are to be scored.
        row_each: there is a row for each request of the plan instead, wanted or not, and perhaps more for padding.
        """
        rows: list[int] = []
        num_top: list[int] = []
        owners: list[tuple[int, int]] = []
        ends = accumulate(plan.num_logit_rows)
        for column, (row, count, end) in enumerate(zip(plan.rows, plan.num_logit_rows, ends, strict=True)):
            if row in self._num_top and count:
                first = column if row_each else end - count
                rows += range(first, first + count)
                num_top += [self._num_top[row]] * count
                owners.append((column, count))
        chosen = self._tensor(rows)
        read_sampled = launch(logits_of, chosen, sampled[chosen], num_top)
        read_prompt: Read = list
        if plan.prompt_rows:
            assert prompt_logits_of is not None, "a prompt's logprobs are wanted"
            read_prompt = self._launch_prompts(plan, prompt_logits_of)

        def read() -> StepLogprobs:
            scores = iter(read_sampled())
            by_column = {column: tuple(islice(scores, count)) for column, count in owners}
            prompt_scores = iter(read_prompt())
            prompts = [tuple(islice(prompt_scores, len(rows.next_token_ids))) for rows in plan.prompt_rows]
            return StepLogprobs(by_column, prompts)

        return read

    def _launch_prompts(self, plan: StepPlan, logits_of: LogitsOf) -> Read:
        starts = list(accumulate(plan.num_new_tokens, initial=0))
        rows: list[int] = []
        token_ids: list[int] = []
        num_top: list[int] = []
        for part in plan.prompt_rows:
            count, first = len(part.next_token_ids), starts[part.column] + part.first
            rows += range(first, first + count)
            token_ids += part.next_token_ids
            num_top += [part.num_top] * count
        return launch(logits_of, self._tensor(rows), self._tensor(token_ids), num_top)

    def _tensor(self, values: Sequence[int]) -> Int[Tensor, "_"]:
        pinned = torch.tensor(values, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return pinned.to(self._device, non_blocking=True)


def as_drawn(
    logits: Float[Tensor, "R V"], temperatures: Float[Tensor, "R"], cuts: Float[Tensor, "R"] | None
) -> Float[Tensor, "R V"]:
    """Float32 logits of the distribution that tokens are drawn from; at temperature 0, which draws none, as they are.

    cuts: the least logit of each row that may be drawn; None: all may.
    """
    logits, noisy = logits.float(), temperatures > 0
    if cuts is not None:
        logits = logits.masked_fill(noisy[:, None] & (logits < cuts[:, None]), -torch.inf)
    # Below the highest, which is 0: over a tiny temperature nothing overflows but what has no probability anyway.
    below = logits - logits.amax(dim=-1, keepdim=True)
    return below / torch.where(noisy, temperatures, 1.0)[:, None]


class Scores(NamedTuple):
    """What is known of one token a row, and of the k most likely ones of the row."""

    token_ids: Int[Tensor, "R"]
    logprobs: Float[Tensor, "R"]
    ranks: Int[Tensor, "R"]
    top_ids: Int[Tensor, "R k"]
    top_logprobs: Float[Tensor, "R k"]


def score(logits: Float[Tensor, "R V"], token_ids: Int[Tensor, "R"], num_top: int) -> Scores:
    """Scores of these tokens under the softmax of their rows, in float32. num_top: k, or -1 for the whole vocabulary.

    A row's scores depend on that row alone: neither on its neighbours nor on how many there are. A token id below 0,
    of a row that failed, is taken for 0.
    """
    token_ids = token_ids.clamp(min=0)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    # Among logits: distinct ones may have the same logprob.
    better = logits > logits.gather(1, token_ids)
    num_top = logits.shape[-1] if num_top < 0 else min(num_top, logits.shape[-1])
    top_ids = _best_first(logits, num_top)
    return Scores(
        token_ids=token_ids[:, 0],
        logprobs=logprobs.gather(1, token_ids)[:, 0],
        ranks=better.sum(dim=-1, dtype=torch.int32) + 1,
        top_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
    )


def launch(logits_of: LogitsOf, rows: Int[Tensor, "R"], token_ids: Int[Tensor, "R"], num_top: Sequence[int]) -> Read:
    """Start scoring a token a row; what is returned reads the scores, once the device is known to have come so far.

    logits_of: the logits of some of the rows.
    num_top: of each row, how many of its best tokens are wanted; -1 is all.
    """
    pieces: list[Scores] = []
    for start, end, most in _pieces(num_top):
        scores = score(logits_of(rows[start:end]), token_ids[start:end], most)
        pieces.append(Scores(*(part.to("cpu", non_blocking=True) for part in scores)))  # from CUDA into pinned memory

    def read() -> list[TokenLogprobs]:
        found = [row for piece in pieces for row in zip(*(part.tolist() for part in piece), strict=True)]
        return [
            TokenLogprobs(token, logprob, rank, tuple(zip(ids, logprobs, strict=True))[: count if count >= 0 else None])
            for (token, logprob, rank, ids, logprobs), count in zip(found, num_top, strict=True)
        ]

    return read


def rehearse(vocab_size: int, device: torch.device) -> None:
    """Take as much memory as scoring ever takes beside a step, and give it back: for who measures steps."""
    for rows, num_top in ((ROWS_AT_ONCE, MAX_LOGPROBS), (ROWS_AT_ONCE_SORTED, -1)):
        logits = torch.zeros(rows, vocab_size, device=device)
        score(as_drawn(logits, logits[:, 0], None), torch.zeros(rows, dtype=torch.int64, device=device), num_top)


def _best_first(logits: Float[Tensor, "R V"], count: int) -> Int[Tensor, "R k"]:
    """Token ids of the largest logits, of equal ones the smallest ids, in order."""
    size, device = logits.shape[-1], logits.device
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=device)
    if count == size:
        return (logits + 0.0).sort(dim=-1, descending=True, stable=True).indices  # -0.0 becomes 0.0, which it equals
    # It is left open which of equal ones topk names: those that equal its last are looked for, the smallest ids first.
    best = logits.topk(count, dim=-1)
    least = best.values[:, -1:]
    countdown = torch.arange(size, 0, -1, dtype=torch.int32, device=device)
    equal = torch.where(logits == least, countdown, 0).topk(count, dim=-1).values
    ids = torch.cat([best.indices, size - equal], dim=1)
    values = torch.cat([best.values, least.expand_as(equal)], dim=1)
    counts = torch.cat([best.values > least, equal > 0], dim=1)
    # One integer for each, no two of them equal: its order among floats, and below it that of its id.
    bits = (values.float() + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = torch.where(counts, (order << 32) | (size - ids), -(2**63))
    return size - (keys.topk(count, dim=-1).values & 0xFFFFFFFF).clamp(min=1)


def _pieces(num_top: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, end, the most that a row of it wants): pieces of successive rows that are scored at once."""
    end = 0
    for sorts, group in groupby(num_top, key=lambda count: count < 0):
        stop = end + len(list(group))
        step = ROWS_AT_ONCE_SORTED if sorts else ROWS_AT_ONCE
        for start in range(end, stop, step):
            end = min(start + step, stop)
            yield start, end, max(num_top[start:end])
