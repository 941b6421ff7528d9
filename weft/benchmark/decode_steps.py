"""Steady decode steps: an engine in which B requests of one length decode, nobody joins and nobody leaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from time import perf_counter
from typing import Any

from weft.benchmark.device_waits import DeviceWaits
from weft.inference.engine import Engine
from weft.inference.sampling_params import SamplingParams

DRAWN: Mapping[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}

_WARM_UP = 8  # steady steps before the measured ones


@dataclass(frozen=True, kw_only=True)
class DecodeTimes:
    """step_s: of each repetition, wall time a step.   contexts: mean tokens of a request in each.

    host_s: of each step of one more repetition, time in `Engine.step` without the waits for the device; empty on CPUs.
    """

    step_s: tuple[float, ...]
    contexts: tuple[float, ...]
    host_s: tuple[float, ...]


class SteadyDecode:
    """`batch` requests in an engine that has nothing else to do, decoding; `close` ends them.

    steps, repetitions: the repetitions follow one another, and `context` tokens are reached in the middle of them, so
    that their median is a step at that context.   draws: tokens are drawn from a cut distribution, by seed; not greedy.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        batch: int,
        context: int,
        steps: int,
        repetitions: int,
        seed: int,
        draws: bool = False,
    ) -> None:
        self._engine, self._batch, self._steps, self._repetitions = engine, batch, steps, repetitions
        random = Random(seed)
        prompt = context - steps * repetitions // 2 - _WARM_UP
        assert prompt > 0, "the measured steps begin before the first token"
        self._lengths = {str(place): prompt for place in range(batch)}
        params = SamplingParams(**(DRAWN if draws else {"temperature": 0}), max_tokens=None, ignore_eos=True)
        for place, name in enumerate(self._lengths):
            tokens = [random.randrange(engine.vocab_size) for _ in range(prompt)]
            engine.add_request(name, tokens, replace(params, seed=place) if draws else params)

    @staticmethod
    def room(context: int, *, steps: int, repetitions: int, batch: int) -> int:
        """`max_model_len` that no request reaches: those whose prompts come first have decoded while others' come."""
        return context + steps * (repetitions + 2) + 2 * _WARM_UP + batch * context // 1024 + batch

    def measure(self, advance: Callable[[], None]) -> DecodeTimes:
        started: set[str] = set()
        while len(started) < self._batch:
            started.update(self._step())
        for _ in range(_WARM_UP):
            self._step()
        step_s, contexts = [], []
        for _ in range(self._repetitions):
            before = self.context
            step_s.append(self._seconds_a_step())
            contexts.append((before + self.context) / 2)
            advance()
        on_gpu = self._engine.placement.device.type == "cuda"
        host_s = tuple(self.host_seconds()) if on_gpu else ()
        return DecodeTimes(step_s=tuple(step_s), contexts=tuple(contexts), host_s=host_s)

    def host_seconds(self) -> list[float]:
        """Of each of `steps` more steps: time in `Engine.step` less what is spent waiting for a GPU."""
        waits, seconds = DeviceWaits(), []
        with waits.watch():
            for _ in range(self._steps):
                waited, start = waits.seconds, perf_counter()
                outputs = self._engine.step()
                seconds.append(perf_counter() - start - (waits.seconds - waited))
                for output in outputs:
                    self._lengths[output.request_id] += len(output.new_token_ids)
        return seconds

    @property
    def context(self) -> float:
        """Mean tokens of a request, as far as they were given out."""
        return sum(self._lengths.values()) / self._batch

    def close(self) -> None:
        for name in self._lengths:
            self._engine.abort(name)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _step(self) -> list[str]:
        """Who was given a token."""
        outputs = self._engine.step()
        for output in outputs:
            assert not output.finished, f"request {output.request_id} ended: {output.finish_reason}"
            self._lengths[output.request_id] += len(output.new_token_ids)
        return [output.request_id for output in outputs if output.new_token_ids]

    def _seconds_a_step(self) -> float:
        """Wall time by tokens given out: where tokens come a step late, as many steps have ended as were started."""
        given, start = 0, perf_counter()
        for _ in range(self._steps):
            given += len(self._step())
        elapsed = perf_counter() - start
        assert given, "no step gave a token"
        return elapsed * self._batch / given


def read_bytes(shape: Mapping[str, Any], *, itemsize: int, batch: int, context: int) -> int:
    """Bytes that a decode step of this Llama shape reads at least: weights and head once, each request's cache.

    An embedding that is not the head as well is not among them: a step reads a row of it a request.
    """
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    layer = hidden * (2 * queries + 2 * keys + 3 * shape["intermediate_size"] + 2)  # two norms among them
    weights = shape["num_hidden_layers"] * layer + hidden * (shape["vocab_size"] + 1)
    return itemsize * (weights + batch * context * shape["num_hidden_layers"] * 2 * keys)
