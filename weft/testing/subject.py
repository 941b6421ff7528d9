"""weft's own engine as a subject: its tokens and the logits of every step, recorded through the runner's observer."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.batch import SamplingRows
from weft.config import EngineConfig
from weft.inference.engine import Engine
from weft.inference.plan import StepPlan
from weft.inference.request import FinishReason
from weft.inference.sampler import Sampler
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.interface import Checkpoint
from weft.testing.continuation import Continuation


class Subject:
    """One engine, and what it does with prompts. `sampler` replaces the engine's own (see ForcedSampler)."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        sampler: Sampler | None = None,
        show_progress: bool = False,
    ) -> None:
        self._seen = _Logits()
        self.engine = Engine(
            config, checkpoint, sampler=sampler, observe=self._seen.record, show_progress=show_progress
        )

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        arrivals: Sequence[int] | None = None,
        on_finished: Callable[[], None] = lambda: None,
    ) -> list[Continuation]:
        """Every prompt to its end.

        arrivals: the step before which each is added; None adds all at once, in the order given.
        on_finished: called as each one ends.
        """
        self._seen.by_request.clear()
        tokens: dict[str, list[int]] = defaultdict(list)
        ended: dict[str, FinishReason] = {}
        for step in count():
            for place, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                if step == (0 if arrivals is None else arrivals[place]):
                    self.engine.add_request(str(place), prompt, param)
            if len(ended) == len(prompts):
                break
            for output in self.engine.step():
                tokens[output.request_id].extend(output.new_token_ids)
                if output.finish_reason is not None:
                    ended[output.request_id] = output.finish_reason
                    on_finished()
        return [
            Continuation(
                prompt_token_ids=tuple(prompt),
                token_ids=tuple(tokens[str(place)]),
                logits=torch.stack(self._logits_of(str(place), len(tokens[str(place)]), ended[str(place)])),
                finish_reason=ended[str(place)],
            )
            for place, prompt in enumerate(prompts)
        ]

    def _logits_of(self, request_id: str, num_tokens: int, reason: FinishReason) -> list[Float[Tensor, "V"]]:
        """A row for each token said. With overlap the step after a stop token is under way when that one is read."""
        rows = self._seen.by_request[request_id]
        is_overrun = self.engine.overlaps and reason == "stop" and len(rows) == num_tokens + 1
        return rows[:num_tokens] if is_overrun else rows


class _Logits:
    """What an engine was seen to compute. It knows no engine, so that a subject leaves with its last reference: in a
    circle of the two a whole model would wait for the garbage collector, which does not see how large it is.
    """

    def __init__(self) -> None:
        self.by_request: dict[str, list[Float[Tensor, "V"]]] = defaultdict(list)

    def record(self, plan: StepPlan, logits: Float[Tensor, "R V"]) -> None:
        owners = (name for name, rows in zip(plan.request_ids, plan.num_logit_rows, strict=True) if rows)
        for request_id, row in zip(owners, logits.cpu(), strict=True):
            self.by_request[request_id].append(row)


class ForcedSampler:
    """Teacher forcing: ignores the logits and says given tokens; the request with seed i, those of reference i."""

    def __init__(self) -> None:
        self._references: Sequence[Continuation] = ()

    def force(self, references: Sequence[Continuation]) -> list[SamplingParams]:
        """From now on say these, one request each; what each request must ask for, to end with its reference."""
        self._references = references
        return [
            SamplingParams(temperature=0, seed=seed, max_tokens=len(reference.token_ids))
            for seed, reference in enumerate(references)
        ]

    def __call__(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int[Tensor, "R"]:
        tokens = [
            self._references[seed].token_ids[position - len(self._references[seed].prompt_token_ids)]
            for seed, position in zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True)
        ]
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
