"""HuggingFace's continuous batching, through the manager below `generate_batch`, which takes each request's own length.

Written for transformers 5.17 to 5.24.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from itertools import count
from typing import Any

from weft.testing.engines.interface import Ability, Answer, Job, ModelUnderTest
from weft.testing.oracle import Oracle

_TOKENS_OF_A_BLOCK = 256  # HuggingFace's default
_TIMEOUT_S = 5.0


class HuggingFaceContinuous:
    """As `generate_batch` starts it, prefix sharing included; room for the laws' requests, and logprobs on."""

    def __init__(self, model: ModelUnderTest, argument: str | None = None) -> None:
        oracle = Oracle(model.checkpoint.tokenizer, dtype=model.dtype, device=model.device)
        self._model, self._eos = oracle.model, sorted(oracle.eos_token_ids)
        self._names = map(str, count())
        self._open = ExitStack()
        self._manager: Any = self._open.enter_context(_manager(self._model, self._eos, model))
        self.description = f"transformers {version('transformers')}: continuous batching"
        self.lacks: Mapping[Ability, str] = {
            "logits": "it gives the logprob of each token alone",
            "finish_reasons": "its GenerationOutput has no field for one",
            "seeds": "a manager has one seed for all of its requests",
        }

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        """Raises: RuntimeError if its thread fails or it drops a request."""
        assert all(job.seed is None for job in jobs), "it lacks seeds"
        names = [next(self._names) for _ in jobs]
        for name, job in zip(names, jobs, strict=True):
            self._manager.add_request(
                list(job.prompt_token_ids),
                request_id=name,
                max_new_tokens=job.max_new_tokens,
                eos_token_id=[*self._eos, *job.stop_token_ids] or -1,
            )
        answers: dict[str, Answer] = {}
        while len(answers) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError(f"its thread ended after {len(answers)} of {len(names)} answers")
            elif result.error is not None:
                raise RuntimeError(f"request {result.request_id}: {result.error}")
            elif result.is_finished():
                answers[result.request_id] = Answer(
                    token_ids=tuple(result.generated_tokens), logprobs=tuple(result.logprobs)
                )
        return [answers[name] for name in names]

    def close(self) -> None:
        self._open.close()
        del self._model, self._manager


def _manager(model: Any, eos: list[int], room: ModelUnderTest) -> Any:
    """A context in which the manager runs."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks = -(-room.max_model_len // _TOKENS_OF_A_BLOCK) + 1
    return model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=eos or -1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=room.max_num_seqs * blocks,
            max_batch_tokens=max(2048, room.max_num_seqs),
            max_requests_per_batch=room.max_num_seqs,
            return_logprobs=True,
        ),
        timeout=_TIMEOUT_S,
    )


ENGINE = HuggingFaceContinuous
