"""Which sizes steps run in: a few that are captured, and coarse ones for longer steps. Pure; no torch.

A step runs in the smallest size that holds it; padding requests are the scratch row and padding tokens write nowhere.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from weft.config import Limits

# A launch takes the host about 120 µs, a layer takes eleven, and large products run at about 600 TFLOP/s: beyond so
# many tokens a step takes the device twice as long as its launches take the host, which has half of its time for all
# else, and a graph would gain nothing.
_LAUNCH_S, _LAUNCHES_PER_LAYER, _FLOP_PER_S, _DEVICE_OVER_HOST = 120e-6, 11, 600e12, 2
_ROUNDING = 16  # of tokens where no graph is: kernels are compiled anew for numbers that are no multiple of it


@dataclass(frozen=True, order=True)
class StepSize:
    """Tokens and requests that a step computes, padding included; as many of both is a step of decodes.

    truncates: whether it looks at top_k, top_p and min_p.
    """

    num_tokens: int
    num_requests: int
    truncates: bool = False

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_requests


class StepSizes:
    """The sizes of one engine. captured: those that are graphs.

    longest: the sizes of launched steps at their longest, one for each number of requests.
    """

    def __init__(self, limits: Limits, *, batch_sizes: Sequence[int] | None = None, most_tokens: int) -> None:
        """batch_sizes: those of decodes; None is about twenty.   most_tokens: of a captured step (`tokens_worth`)."""
        most = limits.max_num_seqs
        self._decodes = sorted(set(batch_sizes)) if batch_sizes is not None else decode_sizes(most)
        # Padding requests cost a longer step next to nothing; each number of requests costs graphs and compiled forms.
        self._requests = [*(size for size in (64, 256, 1024) if size < most), most]
        counts = _token_counts(min(most_tokens, limits.max_num_batched_tokens))
        # As many tokens as requests would be a step of decodes: a step that computes prompts is padded beyond.
        self._tokens = {
            count: [tokens for tokens in counts if tokens > count] or [count + 1] for count in self._requests
        }
        # Beside what they compute, looking for rows to truncate is nothing: one graph for both.
        mixed = [StepSize(tokens, count, truncates=True) for count in self._requests for tokens in self._tokens[count]]
        decodes = [StepSize(size, size, truncates) for size in self._decodes for truncates in (False, True)]
        self.captured = [*decodes, *mixed]
        longest = max(limits.max_num_batched_tokens, most + 1)
        self.longest = [StepSize(_rounded(longest), count, truncates=True) for count in self._requests]
        self._captured = frozenset(self.captured)

    def __str__(self) -> str:
        longest, decodes = max(self.captured).num_tokens, 2 * len(self._decodes)
        return (
            f"{decodes} graphs of decodes ({self._decodes[0]} to {self._decodes[-1]} requests) and "
            f"{len(self.captured) - decodes} of longer steps (up to {longest} tokens)"
        )

    def __contains__(self, size: StepSize) -> bool:
        """Whether it is captured."""
        return size in self._captured

    def size_for(self, num_tokens: int, num_requests: int, *, truncates: bool = False) -> StepSize:
        """The size of a step of this many tokens and requests, which have one token each at least."""
        if num_tokens == num_requests:
            place = bisect_left(self._decodes, num_tokens)
            size = self._decodes[place] if place < len(self._decodes) else num_tokens
            return StepSize(size, size, truncates)
        count = self._requests[bisect_left(self._requests, num_requests)]
        tokens = self._tokens[count]
        place = bisect_left(tokens, num_tokens)
        return StepSize(tokens[place] if place < len(tokens) else _rounded(num_tokens), count, truncates=True)


def tokens_worth(num_parameters: int, num_layers: int) -> int:
    """Tokens of the longest step that is worth a graph: of a small model many, of a large one few.

    >>> tokens_worth(190_000_000, 12), tokens_worth(8_000_000_000, 32)
    (50021, 3168)
    """
    launching_s = num_layers * _LAUNCHES_PER_LAYER * _LAUNCH_S
    return int(_DEVICE_OVER_HOST * launching_s * _FLOP_PER_S / (2 * num_parameters))


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes whose decode steps are captured unless others are asked for: close where steps are short.

    >>> decode_sizes(20)
    [1, 2, 4, 8, 12, 16, 20]
    """
    close = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    far = range(320, max_num_seqs, 64)
    return [*(size for size in (*close, *far) if size < max_num_seqs), max_num_seqs]


def _token_counts(most: int) -> list[int]:
    """Up to a sixteenth of padding, and 32 tokens at the low end.

    >>> _token_counts(300)
    [32, 64, 96, 128, 160, 192, 224, 256, 288, 300]
    """
    counts: list[int] = []
    step = 32
    while (counts[-1] if counts else 0) + step < most:
        counts.append((counts[-1] if counts else 0) + step)
        if counts[-1] >= 16 * step:
            step *= 2
    return [*counts, most]


def _rounded(number: int) -> int:
    return -(-number // _ROUNDING) * _ROUNDING
