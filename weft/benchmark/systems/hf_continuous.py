"""HuggingFace's continuous batching: the manager below `generate_batch`, which itself knows one output length for all.

Written for transformers 5.17 to 5.24. `generate_batch` starts such a manager, hands it every request and waits; here
each request brings its own length, and starting and stopping is left out of the time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from weft.benchmark.measure import Answer, Outcome
from weft.benchmark.provenance import installed_version
from weft.benchmark.served_model import ServedModel
from weft.benchmark.workload import Workload

_TOKENS_OF_A_BLOCK = 256  # HuggingFace's default
_TIMEOUT_S = 5.0


class HuggingFaceContinuous:
    """The same room as weft's: requests in flight, tokens of a step, and a pool that holds every request in flight."""

    def __init__(self, model: ServedModel, workload: Workload) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.version = installed_version("transformers") or ""
        self._model = model.huggingface_model()
        self._num_runs = 0
        self._open = ExitStack()
        blocks = -(-workload.max_num_tokens // _TOKENS_OF_A_BLOCK) + 1
        self._manager: Any = self._open.enter_context(
            self._model.continuous_batching_context_manager(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
                continuous_batching_config=ContinuousBatchingConfig(
                    num_blocks=workload.in_flight * blocks,
                    max_batch_tokens=max(2048, workload.in_flight),
                    max_requests_per_batch=workload.in_flight,
                    allow_block_sharing=False,
                ),
                timeout=_TIMEOUT_S,
            )
        )

    def run(self, workload: Workload, advance: Callable[[], None]) -> Outcome:
        self._num_runs += 1
        start = perf_counter()
        names = [f"{self._num_runs}.{place}" for place in range(len(workload.jobs))]
        for name, job in zip(names, workload.jobs, strict=True):
            self._manager.add_request(
                list(job.prompt_token_ids),
                request_id=name,
                max_new_tokens=job.num_output_tokens,
                record_timestamps=True,
            )
        answers: dict[str, Answer] = {}
        while len(answers) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    break  # its thread has failed and said why; what is missing shows as unequal
                continue
            if not result.is_finished():
                continue
            times = tuple(time - start for time in result.timestamps or ())
            answers[result.request_id] = Answer(token_ids=tuple(result.generated_tokens), times=times)
            advance()
        elapsed = perf_counter() - start
        nothing = Answer(token_ids=(), times=())
        return Outcome(answers=tuple(answers.get(name, nothing) for name in names), elapsed_s=elapsed)

    def close(self) -> None:
        self._open.close()
        del self._model, self._manager


SYSTEM = HuggingFaceContinuous
