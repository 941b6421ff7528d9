"""weft's own engine, driven step by step as any caller may drive it."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from weft import __version__
from weft.benchmark.measure import Answer, Outcome
from weft.benchmark.served_model import ServedModel
from weft.benchmark.workload import Workload
from weft.config import EngineConfig
from weft.inference.engine import Engine
from weft.inference.runner import Observer
from weft.inference.sampling_params import SamplingParams


class WeftSystem:
    """`engine_options` are fields of `weft.config`, over those that the workload implies; `observe` sees every step."""

    version = __version__

    def __init__(
        self, model: ServedModel, workload: Workload, *, observe: Observer | None = None, **engine_options: Any
    ) -> None:
        options: dict[str, Any] = {
            "model": model.name,
            "dtype": model.dtype_name,
            "device": str(model.device),
            "max_model_len": workload.max_num_tokens,
            "max_num_seqs": workload.in_flight,
            "max_num_batched_tokens": max(2048, workload.in_flight),
            "enable_prefix_caching": False,  # a repetition would find what the run before computed
        }
        self.engine = Engine(EngineConfig.of(**(options | engine_options)), model.checkpoint, observe=observe)

    def run(self, workload: Workload, advance: Callable[[], None]) -> Outcome:
        token_ids: list[list[int]] = [[] for _ in workload.jobs]
        times: list[list[float]] = [[] for _ in workload.jobs]
        start = perf_counter()
        for place, job in enumerate(workload.jobs):
            params = SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True)
            self.engine.add_request(str(place), job.prompt_token_ids, params)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = perf_counter() - start
            for output in outputs:
                place = int(output.request_id)
                token_ids[place].extend(output.new_token_ids)
                times[place].extend([now] * len(output.new_token_ids))
                if output.finished:
                    advance()
        elapsed = perf_counter() - start
        answers = (Answer(token_ids=tuple(a), times=tuple(b)) for a, b in zip(token_ids, times, strict=True))
        return Outcome(answers=tuple(answers), elapsed_s=elapsed)

    def close(self) -> None:
        del self.engine


SYSTEM = WeftSystem
