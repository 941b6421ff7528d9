"""HuggingFace `generate`, one prompt at a time: the reference judged by itself, which every law must acquit."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version

from weft.testing.engines.interface import Ability, Answer, Job, ModelUnderTest
from weft.testing.oracle import Oracle


class HuggingFaceGenerate:
    """A model of its own, loaded again, so that nothing the reference holds is shared."""

    def __init__(self, model: ModelUnderTest, argument: str | None = None) -> None:
        self._oracle = Oracle(model.checkpoint.tokenizer, dtype=model.dtype, device=model.device)
        self.description = f"transformers {version('transformers')}: generate, one prompt at a time"
        self.lacks: Mapping[Ability, str] = {"logprobs": "its logits are judged, which they are made of"}

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        said = [
            self._oracle.generate(
                job.prompt_token_ids,
                job.max_new_tokens,
                stop_token_ids=job.stop_token_ids,
                seed=job.seed,
            )
            for job in jobs
        ]
        return [Answer(token_ids=one.token_ids, finish_reason=one.finish_reason, logits=one.logits) for one in said]

    def close(self) -> None:
        del self._oracle


ENGINE = HuggingFaceGenerate
