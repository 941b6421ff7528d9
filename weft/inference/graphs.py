"""Steps captured as CUDA graphs: the host starts a step with one call.

All graphs share one memory pool: they never run at once, and each needs its memory only while it runs.
"""

from collections.abc import Iterable

import torch
from tqdm import tqdm

from weft.inference.step_program import StepProgram
from weft.inference.step_sizes import StepSize


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

    def __contains__(self, size: StepSize) -> bool:
        return size in self._graphs

    def replay(self, size: StepSize) -> None:
        self._graphs[size].replay()
