"""When HuggingFace `generate` knew each token: what its streamer is called with, turned into seconds."""

from time import perf_counter
from typing import Any


class TokenTimes:
    """A streamer: handed the prompts first, then a token of every request as it is known.

    seconds: of each token, since `start`, a reading of `perf_counter`.
    """

    def __init__(self, start: float) -> None:
        self.seconds: list[float] = []
        self._start = start
        self._seen_prompt = False

    def put(self, value: Any) -> None:
        if self._seen_prompt:
            self.seconds.append(perf_counter() - self._start)
        self._seen_prompt = True

    def end(self) -> None:
        pass
