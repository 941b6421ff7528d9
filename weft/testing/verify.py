"""The token-exact check as a whole: prompts through HuggingFace and through weft, judged by tier A or C.

`main.py` and the test suites run this one function; how it looks on a screen is `report.py`'s business.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVar

import torch

from weft.config import EngineConfig
from weft.errors import RequestError
from weft.inference.placement import place
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.interface import Checkpoint
from weft.testing.exactness import LOGIT_TOLERANCE, Comparison, Verdict, allowed_ties, compare_exact
from weft.testing.near_ties import Audit, audit_near_ties
from weft.testing.oracle import Oracle
from weft.testing.reference import own_noise
from weft.testing.subject import ForcedSampler, Subject


@dataclass(frozen=True, kw_only=True)
class NamedPrompt:
    """What the tables call a prompt, and its tokens."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Every prompt's comparison (with forced tokens under tier C), and the audit that tier C judges by.

    description: the engine's own account of backend, dtype and device.
    """

    prompts: Sequence[NamedPrompt]
    comparisons: Sequence[Comparison]
    audit: Audit | None
    description: str

    @property
    def num_equal(self) -> int:
        return sum(comparison.verdict is Verdict.EQUAL for comparison in self.comparisons)

    @property
    def num_ties(self) -> int:
        return sum(comparison.verdict is Verdict.TIE for comparison in self.comparisons)

    @property
    def num_positions(self) -> int:
        return sum(comparison.num_tokens for comparison in self.comparisons)

    @property
    def passed(self) -> bool:
        if self.audit is not None:
            return self.audit.passed and self.num_equal == len(self.comparisons)
        all_judged = self.num_equal + self.num_ties == len(self.comparisons)
        return bool(self.comparisons) and all_judged and self.num_ties <= allowed_ties(self.num_positions)


# Told the stage, its length, and then, by calls without one, each prompt that is done.
Progress = Callable[[str, int], Callable[[], None]]


def _silent(stage: str, total: int) -> Callable[[], None]:
    return lambda: None


def verify(
    config: EngineConfig,
    checkpoint: Checkpoint,
    prompts: Sequence[NamedPrompt],
    *,
    max_new_tokens: int,
    progress: Progress = _silent,
) -> Result:
    """Greedy continuations of weft against HuggingFace `generate`, which sees one prompt at a time.

    weft sees all prompts at once, in an order drawn from `config.model.seed`. float32 is judged by tier A, a narrower
    dtype by tier C.
    Raises: what building an engine raises.
    """
    placement = place(config.model, checkpoint.stored_dtype)
    forced = None if placement.dtype == torch.float32 else ForcedSampler()
    subject = Subject(config, checkpoint, sampler=forced)
    greedy = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    for index, prompt in enumerate(prompts):
        try:
            subject.engine.validate(prompt.token_ids, greedy)
        except RequestError as error:
            raise error.at(index) from error
    order = list(range(len(prompts)))
    Random(config.model.seed).shuffle(order)
    shuffled = [prompts[index].token_ids for index in order]

    oracle = Oracle(checkpoint.tokenizer, dtype=placement.dtype, device=placement.device)
    done = progress("HuggingFace generate", len(prompts))
    references = [_counted(done, oracle.generate(token_ids, max_new_tokens)) for token_ids in shuffled]
    params = [greedy] * len(prompts) if forced is None else forced.force(references)
    answers = subject.run(shuffled, params, on_finished=progress("weft", len(prompts)))
    audit = None
    if forced is not None:
        done = progress("HuggingFace, in one pass", len(prompts))
        again = [_counted(done, oracle.score(item.prompt_token_ids, item.token_ids)) for item in references]
        audit = audit_near_ties(
            [item.logits for item in references], again, [item.logits for item in answers], dtype=placement.dtype
        )
    comparisons = {
        index: compare_exact(
            reference,
            answer,
            noise=partial(own_noise, oracle, reference),
            tolerance=LOGIT_TOLERANCE if audit is None else math.inf,  # tier C judges logits in the audit
        )
        for index, reference, answer in zip(order, references, answers, strict=True)
    }
    return Result(
        prompts=prompts,
        comparisons=[comparisons[index] for index in range(len(prompts))],
        audit=audit,
        description=subject.engine.description,
    )


Item = TypeVar("Item")


def _counted(done: Callable[[], None], item: Item) -> Item:
    done()
    return item
