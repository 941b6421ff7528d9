"""weft's own engine, as the laws see any other."""

from collections.abc import Mapping, Sequence

from weft import __version__
from weft.config import EngineConfig
from weft.inference.sampling_params import SamplingParams
from weft.testing.engines.interface import Ability, Answer, Job, ModelUnderTest
from weft.testing.subject import Subject


class WeftEngine:
    """With its defaults, but for the room that the laws need."""

    def __init__(self, model: ModelUnderTest, argument: str | None = None) -> None:
        """Raises: ConfigError, CheckpointError and their kinds."""
        config = EngineConfig.of(
            model=model.name,
            dtype=model.dtype_name,
            device=str(model.device),
            max_model_len=model.max_model_len,
            max_num_seqs=model.max_num_seqs,
        )
        self._subject = Subject(config, model.checkpoint)
        self.description = f"weft {__version__}: {self._subject.engine.description}"
        self.lacks: Mapping[Ability, str] = {"logprobs": "its logits are judged, which they are made of"}

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        params = [
            SamplingParams(
                temperature=0 if job.seed is None else 1,
                seed=job.seed,
                max_tokens=job.max_new_tokens,
                stop_token_ids=job.stop_token_ids,
            )
            for job in jobs
        ]
        return [
            Answer(token_ids=said.token_ids, finish_reason=said.finish_reason, logits=said.logits)
            for said in self._subject.run([job.prompt_token_ids for job in jobs], params)
        ]

    def close(self) -> None:
        del self._subject


ENGINE = WeftEngine
