"""Steps captured as CUDA graphs: the host starts a step with one call.

All graphs share one memory pool: they never run at once, and each needs its memory only while it runs. So what a graph
leaves is there until the next one runs, but no tensor may keep it: that would take it from the others.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from weft.inference.step_program import StepProgram
from weft.inference.step_sizes import StepSize


class StepGraphs:
    """Graphs of one program by size."""

    def __init__(self, program: StepProgram, sizes: Iterable[StepSize], *, show_progress: bool = False) -> None:
        """Capture all of them, the largest first, so that the smaller ones fit into its memory."""
        self._graphs: dict[StepSize, tuple[torch.cuda.CUDAGraph, Float[Tensor, "R V"]]] = {}
        pool = torch.cuda.graph_pool_handle()
        ordered = sorted(sizes, reverse=True)
        for size in tqdm(ordered, desc="Capturing", unit="graph", disable=not show_progress, leave=False):
            program.run(size)  # compiles what is missing, which a capture must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = program.run(size)
            self._graphs[size] = graph, _window(logits)
            del logits

    def __contains__(self, size: StepSize) -> bool:
        return size in self._graphs

    def replay(self, size: StepSize) -> Float[Tensor, "R V"]:
        """Run the step; the logits that it leaves, which the next replay of any size overwrites."""
        graph, logits = self._graphs[size]
        graph.replay()
        return logits


class _Memory:
    """The bytes of a tensor, which they do not keep."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "its bytes are not all of one piece"
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _window(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that does not keep it."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
