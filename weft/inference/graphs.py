"""Steps captured as CUDA graphs, one for each of a few sizes: the host starts a step with one call.

A step runs in the smallest captured size that holds it. Padding requests are the scratch row and padding tokens write
nowhere. All graphs share one memory pool: they never run at once, and each needs its memory only while it runs.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch
from tqdm import tqdm

from weft.inference.step_program import StepProgram, StepSize

_MOST_TOKENS = 2048  # beyond, a step takes the device longer than its launches take the host


class StepGraphs:
    """Graphs of one program by size."""

    def __init__(self, program: StepProgram, sizes: Iterable[StepSize], *, show_progress: bool = False) -> None:
        """Capture all of them, the largest first, so that the smaller ones fit into its memory."""
        self._graphs: dict[StepSize, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        ordered = sorted(sizes, reverse=True)
        for size in tqdm(ordered, desc="Capturing", unit="graph", disable=not show_progress, leave=False):
            program.run(size)  # compiles what is missing, which a capture must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                program.run(size)
            self._graphs[size] = graph
        self._index(ordered)

    def _index(self, sizes: Iterable[StepSize]) -> None:
        """Arrange the sizes for `size_for`."""
        ordered = list(sizes)
        self._decodes = sorted(size for size in ordered if size.is_decode)
        mixed = [size for size in ordered if not size.is_decode]
        self._requests = sorted({size.num_requests for size in mixed})
        self._tokens = {
            count: sorted(size.num_tokens for size in mixed if size.num_requests == count) for count in self._requests
        }

    def __len__(self) -> int:
        return len(self._graphs)

    def size_for(self, num_tokens: int, num_requests: int) -> StepSize | None:
        """The smallest captured size that holds such a step, or None. Requests have one token each at least."""
        if num_tokens == num_requests:
            place = bisect_left(self._decodes, StepSize(num_tokens, num_tokens))
            return self._decodes[place] if place < len(self._decodes) else None
        place = bisect_left(self._requests, num_requests)
        if place == len(self._requests):
            return None
        count = self._requests[place]
        tokens = self._tokens[count]
        place = bisect_left(tokens, num_tokens)
        return StepSize(tokens[place], count) if place < len(tokens) else None

    def replay(self, size: StepSize) -> None:
        self._graphs[size].replay()


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes whose decode steps are captured unless others are asked for: close where steps are short.

    >>> decode_sizes(20)
    [1, 2, 4, 8, 12, 16, 20]
    """
    close = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    far = range(320, max_num_seqs, 64)
    return [*(size for size in (*close, *far) if size < max_num_seqs), max_num_seqs]


def step_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, batch_sizes: Sequence[int] | None = None
) -> list[StepSize]:
    """Every size that is captured: decodes, and steps that compute prompts as well, by requests and by tokens."""
    decodes = sorted(set(batch_sizes)) if batch_sizes is not None else decode_sizes(max_num_seqs)
    requests = [*(size for size in (16, 64, 256, 1024) if size < max_num_seqs), max_num_seqs]
    counts = _token_counts(min(_MOST_TOKENS, max_num_batched_tokens))
    # As many tokens as requests would be a step of decodes: a mixed step is padded beyond.
    tokens = {count: [number for number in counts if number > count] or [count + 1] for count in requests}
    mixed = [StepSize(number, count) for count in requests for number in tokens[count]]
    return [*(StepSize(size, size) for size in decodes), *mixed]


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
