"""weft's own engine, driven step by step as any caller may drive it."""

from collections.abc import Callable, Mapping
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
    """`engine_options` are fields of `weft.config`, over those that the workload implies; `observe` sees every step.

    closed_loop: at most `in_flight` requests are in the engine, a new one enters as one leaves; else all are there at
        the start and wait inside.
    """

    version = __version__

    def __init__(
        self,
        model: ServedModel,
        workload: Workload,
        *,
        observe: Observer | None = None,
        closed_loop: bool = False,
        **engine_options: Any,
    ) -> None:
        self._closed_loop = closed_loop
        self.engine = Engine(self.config(model, workload, engine_options), model.checkpoint, observe=observe)

    @staticmethod
    def config(model: ServedModel, workload: Workload, engine_options: Mapping[str, Any]) -> EngineConfig:
        """Of the engine that this would be. Raises: ConfigError."""
        options: dict[str, Any] = {
            "max_model_len": workload.max_num_tokens,
            "max_num_seqs": workload.in_flight,
            "max_num_batched_tokens": max(2048, workload.in_flight),
            "enable_prefix_caching": False,  # a repetition would find what the run before computed
        }
        return model.engine_config(options | dict(engine_options))

    @classmethod
    def check(cls, model: ServedModel, workload: Workload, engine_options: Mapping[str, Any]) -> None:
        """Raise what building it would, as far as that shows without reading weights."""
        model.check(cls.config(model, workload, engine_options), longest=workload.max_num_tokens)

    def run(self, workload: Workload, advance: Callable[[], None]) -> Outcome:
        jobs = workload.jobs
        token_ids: list[list[int]] = [[] for _ in jobs]
        times: list[list[float]] = [[] for _ in jobs]
        entered: list[float] = []
        start = perf_counter()

        def enter(now: float) -> None:
            job = jobs[len(entered)]
            params = SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True)
            self.engine.add_request(str(len(entered)), job.prompt_token_ids, params)
            entered.append(now)

        for _ in range(min(workload.in_flight, len(jobs)) if self._closed_loop else len(jobs)):
            enter(0.0)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = perf_counter() - start
            for output in outputs:
                place = int(output.request_id)
                token_ids[place].extend(output.new_token_ids)
                times[place].extend([now] * len(output.new_token_ids))
                if output.finished:
                    advance()
                    if len(entered) < len(jobs):
                        enter(now)
        elapsed = perf_counter() - start
        answers = (
            Answer(token_ids=tuple(tokens), times=tuple(when), entered_s=at)
            for tokens, when, at in zip(token_ids, times, entered, strict=True)
        )
        return Outcome(answers=tuple(answers), elapsed_s=elapsed)

    def close(self) -> None:
        del self.engine


SYSTEM = WeftSystem
