"""HuggingFace `generate`, one request at a time, no padding: what most people's first script does."""

from collections.abc import Callable
from time import perf_counter

import torch

from weft.benchmark.measure import Answer, Outcome
from weft.benchmark.provenance import installed_version
from weft.benchmark.served_model import ServedModel
from weft.benchmark.token_times import TokenTimes
from weft.benchmark.workload import Job, Workload


class HuggingFaceGenerate:
    """Requests wait for their turn in the order of arrival."""

    def __init__(self, model: ServedModel, workload: Workload) -> None:
        self.version = installed_version("transformers") or ""
        self._model = model.huggingface_model()
        self._device = model.device

    def run(self, workload: Workload, advance: Callable[[], None]) -> Outcome:
        answers = []
        start = perf_counter()
        for job in workload.jobs:
            answers.append(self._answer(job, start))
            advance()
        return Outcome(answers=tuple(answers), elapsed_s=perf_counter() - start)

    def close(self) -> None:
        del self._model

    @torch.inference_mode()
    def _answer(self, job: Job, start: float) -> Answer:
        from transformers import GenerationConfig

        prompt = torch.tensor([job.prompt_token_ids], device=self._device)
        times = TokenTimes(start)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=job.num_output_tokens, eos_token_id=None, pad_token_id=0
        )
        mask = torch.ones_like(prompt)
        sequences = self._model.generate(prompt, attention_mask=mask, generation_config=config, streamer=times)
        return Answer(token_ids=tuple(sequences[0, prompt.shape[1] :].tolist()), times=tuple(times.seconds))


SYSTEM = HuggingFaceGenerate
