"""Whose prompts are scored, how far they are, and when they are given out: once, with the first token. Plain Python.

A prompt is scored where it is computed, chunk by chunk. What a step under way scores counts already and is read later,
so a request that is preempted computes its tokens again and has none scored twice.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from weft.inference.plan import PromptRows, StepPlan
from weft.inference.request import Request
from weft.inference.step_output import StepOutput
from weft.inference.token_logprobs import StepLogprobs, TokenLogprobs


class PromptScores:
    """Those who are still to be given the logprobs of their prompts."""

    def __init__(self) -> None:
        self._owed: set[Request] = set()

    def __bool__(self) -> bool:
        return bool(self._owed)

    def add(self, request: Request) -> None:
        """Scored so far is what was read: what steps were to score that were then forgotten is to be scored again."""
        if request.prompt_logprobs is not None:
            self._owed.add(request)
            request.num_scored_tokens = len(request.prompt_logprobs)

    def forget(self, request: Request) -> None:
        """It has ended, and with it what it was owed."""
        self._owed.discard(request)

    def plan(self, num_new_tokens: Mapping[Request, int]) -> tuple[PromptRows, ...]:
        """What a step scores beside what it computes for each, before it counts as computed; scored from here on."""
        planned = []
        for column, (request, count) in enumerate(num_new_tokens.items()):
            start, scored = request.num_computed_tokens, request.num_scored_tokens
            end = min(start + count, request.num_prompt_tokens - 1)  # what follows the last one is sampled
            if request.needs_scores and scored < end:
                assert start <= scored, "tokens of a prompt were passed over unscored"
                successors = tuple(request.token_ids[scored + 1 : end + 1])
                num_top = cast("int", request.params.prompt_logprobs)
                planned.append(PromptRows(column, scored - start, successors, num_top))
                request.num_scored_tokens = end
        return tuple(planned)

    def read(self, plan: StepPlan, requests: Sequence[Request], logprobs: StepLogprobs | None) -> None:
        """Keep what a step has scored, until it is given out."""
        if not plan.prompt_rows:
            return
        assert logprobs is not None, "a step did not score what it was to score"
        for rows, scores in zip(plan.prompt_rows, logprobs.prompt, strict=True):
            request = requests[rows.column]
            if not request.has_ended:
                assert request.prompt_logprobs is not None, "a prompt is scored after its scores were given out"
                assert len(scores) == len(rows.next_token_ids)
                request.prompt_logprobs += scores

    def complete(
        self, requests: Sequence[Request], outputs: Sequence[StepOutput], logprobs: StepLogprobs | None
    ) -> list[StepOutput]:
        """The outputs of a step's requests with as many logprobs as tokens, and with those of the prompt where due."""
        columns = {request.request_id: column for column, request in enumerate(requests)}
        complete = []
        for output in outputs:
            column, count = columns[output.request_id], len(output.new_token_ids)
            sampled = () if logprobs is None else tuple(logprobs.sampled.get(column, ()))
            prompt = self._give(requests[column]) if count else None
            complete.append(output._replace(logprobs=sampled[:count], prompt_logprobs=prompt))
        return complete

    def _give(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        """One for each token of the prompt, None for the first; None altogether if nothing is owed (any more)."""
        scores = request.prompt_logprobs
        if scores is None:
            return None
        assert len(scores) == request.num_prompt_tokens - 1, "a token is sampled before its prompt is scored"
        request.prompt_logprobs = None
        self._owed.discard(request)
        return (None, *scores)
