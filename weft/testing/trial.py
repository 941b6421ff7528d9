"""One engine on trial: what it is asked, what HuggingFace says to the same, and whether it gives what it claims.

Knows no law.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from weft.testing.continuation import Continuation
from weft.testing.difference import Decode
from weft.testing.engines.interface import Ability, Answer, EngineUnderTest, Job, ModelUnderTest
from weft.testing.reference import Reference
from weft.tokenizer.hub import HubTokenizer

# Prompts as long as these stand at the edges of blocks of 16, 32, 64, 128 and 256 tokens: what engines are made of.
EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
FINISH_REASONS = {"stop", "length"}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An engine, the reference, and the prompts that laws draw from.

    prompts: token ids.   max_new_tokens: of each answer, at most.   seed: of the order in which they are handed over.
    """

    engine: EngineUnderTest
    reference: Reference
    model: ModelUnderTest
    prompts: Sequence[tuple[int, ...]]
    max_new_tokens: int
    seed: int = 0

    @property
    def decode(self) -> Decode | None:
        tokenizer = self.model.tokenizer
        return None if tokenizer is None else tokenizer.decode

    def lacks(self, *abilities: Ability) -> str | None:
        """Why a law that needs these cannot be judged, or None."""
        reasons = [
            f"no {ability}: {self.engine.lacks[ability]}" for ability in abilities if ability in self.engine.lacks
        ]
        return "; ".join(reasons) or None

    @cached_property
    def tellable(self) -> list[tuple[int, ...]]:
        """The prompts that the engine can be given: all, or those whose text gives back the same tokens."""
        if self.lacks("prompt_token_ids") is None:
            return list(self.prompts)
        return [prompt for prompt in self.prompts if self._text(prompt) is not None]

    @cached_property
    def references(self) -> list[Continuation]:
        """What HuggingFace says to each prompt of `tellable`."""
        return [self.reference.generate(prompt, self.max_new_tokens) for prompt in self.tellable]

    @cached_property
    def answered(self) -> list[Answer]:
        """What the engine says to the same, all handed over at once, in an order drawn by seed."""
        order = list(range(len(self.tellable)))
        Random(self.seed).shuffle(order)
        said = self.ask([self.job(self.tellable[index], self.max_new_tokens) for index in order])
        return [answer for _, answer in sorted(zip(order, said, strict=True), key=lambda pair: pair[0])]

    def prompts_of(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Prompts of these lengths, cut from the given ones; each begins elsewhere, so that none is another's prefix.

        Lengths for which there is no room are left out, and so are cuts that no text can give.
        """
        material = [token for prompt in self.prompts for token in prompt]
        cuts = []
        for place, length in enumerate(lengths):
            start = 7 * place
            endless = material * (-(-(start + length) // len(material)))
            cuts.append(tuple(endless[start : start + length]))
        room = [cut for cut in cuts if len(cut) + self.max_new_tokens <= self.model.max_model_len]
        return room if self.lacks("prompt_token_ids") is None else [cut for cut in room if self._text(cut) is not None]

    def job(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Job:
        needs_text = self.lacks("prompt_token_ids") is not None
        return Job(
            prompt_token_ids=tuple(prompt),
            max_new_tokens=max_new_tokens,
            stop_token_ids=tuple(stop_token_ids),
            seed=seed,
            prompt_text=self._text(prompt) if needs_text else None,
        )

    def ask(self, jobs: Sequence[Job]) -> list[Answer]:
        """The engine's answers, each of which holds all that the engine does not lack.

        Raises: AssertionError if it claims what it does not give.
        """
        answers = self.engine.answer(jobs)
        assert len(answers) == len(jobs), f"{len(answers)} answers to {len(jobs)} requests"
        for place, answer in enumerate(answers):
            self._check(place, answer)
        return answers

    def said_by(self, reference: Continuation) -> tuple[int, ...] | str:
        """What the reference said, as this engine would say it: tokens, or where it lacks them text."""
        if self.lacks("token_ids") is None:
            return reference.token_ids
        tokenizer = self.model.tokenizer
        assert tokenizer is not None, "an engine without token ids needs a model with a tokenizer"
        return tokenizer.decode(reference.token_ids)

    def _check(self, place: int, answer: Answer) -> None:
        given: dict[Ability, object] = {
            "token_ids": answer.token_ids,
            "logits": answer.logits,
            "logprobs": answer.logprobs,
            "finish_reasons": answer.finish_reason,
        }
        missing = [ability for ability, value in given.items() if value is None and ability not in self.engine.lacks]
        assert not missing, f"answer {place} has no {', '.join(missing)}, which the engine does not say it lacks"
        assert answer.said is not None, f"answer {place} has neither token ids nor text"
        reason = answer.finish_reason
        assert reason is None or reason in FINISH_REASONS, f"answer {place} ends by {reason!r}, not by stop or length"
        if answer.token_ids is not None:
            rows = {"logits": answer.logits, "logprobs": answer.logprobs}
            for name, values in rows.items():
                counts = f"{0 if values is None else len(values)} {name} for {len(answer.token_ids)} tokens"
                assert values is None or len(values) == len(answer.token_ids), f"answer {place} has {counts}"

    def _text(self, prompt: Sequence[int]) -> str | None:
        """A text that the tokenizer turns into just these tokens, if there is one."""
        tokenizer = self.model.tokenizer
        return None if tokenizer is None else _text_of(tokenizer, prompt)


def _text_of(tokenizer: HubTokenizer, prompt: Sequence[int]) -> str | None:
    for skipped in (False, True):  # a BOS that the tokenizer puts in front by itself must not stand in the text
        text = tokenizer.decode(list(prompt), skip_special_tokens=skipped)
        if tokenizer.encode(text) == list(prompt):
            return text
    return None
