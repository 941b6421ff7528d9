"""Prompts alone: an engine that computes one prompt after another, each of which ends with its first token."""

from collections.abc import Callable, Mapping
from random import Random
from time import perf_counter
from typing import Any

from weft.benchmark.kernels.arithmetic import causal_flops
from weft.inference.engine import Engine
from weft.inference.sampling_params import SamplingParams

_WARM_UP = 2  # prompts before the measured ones


class PromptsAlone:
    """`prompts` prompts of `length` random tokens at a time, in an engine that has nothing else to do.

    The step's budget is filled as the engine fills it: short prompts share a step, long ones come in chunks.
    """

    def __init__(self, engine: Engine, *, length: int, prompts: int, repetitions: int, seed: int) -> None:
        self._engine, self._length, self._prompts, self._repetitions = engine, length, prompts, repetitions
        self._random = Random(seed)

    def measure(self, advance: Callable[[], None]) -> tuple[float, ...]:
        """Of each repetition the seconds of a prompt: wall time from the first step to the last token, shared out."""
        self._seconds(_WARM_UP)
        seconds = []
        for _ in range(self._repetitions):
            seconds.append(self._seconds(self._prompts) / self._prompts)
            advance()
        return tuple(seconds)

    def _seconds(self, prompts: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=1)
        for place in range(prompts):
            tokens = [self._random.randrange(self._engine.vocab_size) for _ in range(self._length)]
            self._engine.add_request(str(place), tokens, params)
        given, start = 0, perf_counter()
        while self._engine.has_unfinished_requests():
            given += sum(len(output.new_token_ids) for output in self._engine.step())
        elapsed = perf_counter() - start
        assert given == prompts, f"{prompts} prompts gave {given} tokens"
        return elapsed


def prompt_flops(shape: Mapping[str, Any], length: int) -> float:
    """Multiplications and additions of a prompt of this Llama shape: its matrices, causal attention, one row of logits.

    >>> shape = dict.fromkeys(("hidden_size", "head_dim", "intermediate_size", "vocab_size"), 1)
    >>> shape |= {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    >>> prompt_flops(shape, 2)  # 2 x 7 weights x 2 tokens, 4 x 2 scores of attention, 2 of the head
    38.0
    """
    hidden, head_dim, layers = shape["hidden_size"], shape["head_dim"], shape["num_hidden_layers"]
    heads = shape["num_attention_heads"]
    queries, keys = heads * head_dim, shape["num_key_value_heads"] * head_dim
    matrices = layers * hidden * (2 * queries + 2 * keys + 3 * shape["intermediate_size"])
    attention = layers * causal_flops(batch=1, num_queries=length, prefix=0, heads=heads, head_dim=head_dim)
    return 2 * matrices * length + attention + 2 * hidden * shape["vocab_size"]
