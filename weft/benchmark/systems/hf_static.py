"""HuggingFace `generate` over static batches: padded on the left, each batch runs until its longest answer is done.

A request counts with the tokens that it asked for; what its batch computes beyond is the price of a static batch.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from weft.benchmark.measure import Answer, Outcome
from weft.benchmark.provenance import installed_version
from weft.benchmark.served_model import ServedModel
from weft.benchmark.token_times import TokenTimes
from weft.benchmark.workload import Job, Workload


class HuggingFaceStatic:
    """Batches of `in_flight` requests in the order of arrival; a request enters as its batch begins."""

    def __init__(self, model: ServedModel, workload: Workload) -> None:
        self.version = installed_version("transformers") or ""
        self._model = model.huggingface_model()
        self._device = model.device

    def run(self, workload: Workload, advance: Callable[[], None]) -> Outcome:
        answers: list[Answer] = []
        start = perf_counter()
        for first in range(0, len(workload.jobs), workload.in_flight):
            batch = workload.jobs[first : first + workload.in_flight]
            answers += self._answer(batch, start)
            for _ in batch:
                advance()
        return Outcome(answers=tuple(answers), elapsed_s=perf_counter() - start)

    def close(self) -> None:
        del self._model

    @torch.inference_mode()
    def _answer(self, batch: Sequence[Job], start: float) -> list[Answer]:
        from transformers import GenerationConfig

        entered = perf_counter() - start
        longest = max(len(job.prompt_token_ids) for job in batch)
        padding = [longest - len(job.prompt_token_ids) for job in batch]
        rows = [[0] * count + list(job.prompt_token_ids) for count, job in zip(padding, batch, strict=True)]
        mask = [[0] * count + [1] * (longest - count) for count in padding]
        times = TokenTimes(start)
        sequences = self._model.generate(
            torch.tensor(rows, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max(job.num_output_tokens for job in batch),
                eos_token_id=None,
                pad_token_id=0,
            ),
            streamer=times,
        )
        return [
            Answer(
                token_ids=tuple(tokens[: job.num_output_tokens]),
                times=tuple(times.seconds[: job.num_output_tokens]),
                entered_s=entered,
            )
            for tokens, job in zip(sequences[:, longest:].tolist(), batch, strict=True)
        ]


SYSTEM = HuggingFaceStatic
