"""Figures of other runs that rows are read beside, and the targets that rest on them. Data; nothing here was measured
by the run that shows it, and every row that uses one says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from weft.benchmark.row import Target

VLLM = "vLLM 0.24, one H200, another run"
PROTOTYPE = "a prototype of the step in one CUDA graph, one H200, another run"
READ_TB_PER_S = 4.71  # 1e12 bytes/s that one H200 reads, by a sum over 8 GiB


@dataclass(frozen=True, kw_only=True)
class Peer:
    """vLLM on one case: CUDA graphs, FlashAttention 3, torch.compile; better of in-process and a process of its own.

    tokens_per_s: generated tokens by wall time.   between_ms, first_ms: p50; None was not noted.
    factor: how many times its tokens/s weft is to give.   over_huggingface: the same for static batches of `generate`.
    """

    tokens_per_s: int
    between_ms: float
    first_ms: int | None
    factor: float
    over_huggingface: float | None = None

    @property
    def target(self) -> Target:
        return Target(relation=">=", value=self.factor)

    @property
    def first_target(self) -> Target | None:
        return None if self.first_ms is None else Target(relation="<=", value=self.first_ms)

    @property
    def huggingface_target(self) -> Target | None:
        return None if self.over_huggingface is None else Target(relation=">=", value=self.over_huggingface)


def _peer(tokens_per_s: int, between_ms: float, first_ms: int | None, factor: float, over: float | None = None) -> Peer:
    return Peer(
        tokens_per_s=tokens_per_s, between_ms=between_ms, first_ms=first_ms, factor=factor, over_huggingface=over
    )


# By suite and requests in flight.
PEERS: Mapping[tuple[str, int], Peer] = {
    ("ladder", 1): _peer(591, 1.6, 6, 4.0, 20.0),
    ("ladder", 8): _peer(2_875, 1.8, 8, 3.0),
    ("ladder", 32): _peer(8_375, 2.5, 10, 3.0),
    ("ladder", 64): _peer(12_147, 3.7, 17, 3.0, 8.0),
    ("mixed64", 1): _peer(590, 1.6, None, 1.8),
    ("mixed64", 64): _peer(14_673, 2.3, 88, 1.4),
    ("mixed64", 256): _peer(24_897, 7.8, None, 1.4),
    ("big", 1): _peer(200, 4.9, None, 1.2),
    ("big", 64): _peer(3_939, 6.9, 95, 1.1),
    ("big", 256): _peer(5_542, 15.1, None, 1.0),
}

# Seconds until an engine of this shape can serve: Triton's cache warm, and cold.
READY_S: Mapping[str, tuple[Target, Target]] = {
    "llama-1b": (Target(relation="<=", value=10), Target(relation="<=", value=30)),
}


@dataclass(frozen=True, kw_only=True)
class PrototypeStep:
    """Milliseconds of one greedy decode step without a wait for its tokens.

    limit_ms: (weights + head + keys and values read) at the read bandwidth.   fused_ms: cuBLAS and element-wise Triton.
    best_ms: of 6 to 12 variants in each cell, so up to 2 % optimistic.
    """

    limit_ms: float
    fused_ms: float
    best_ms: float


def _step(limit_ms: float, fused_ms: float, best_ms: float) -> PrototypeStep:
    return PrototypeStep(limit_ms=limit_ms, fused_ms=fused_ms, best_ms=best_ms)


# By shape, batch size and context. Where a range was noted (190m, 1 x 512: 0.246-0.258), its middle.
PROTOTYPE_STEPS: Mapping[tuple[str, int, int], PrototypeStep] = {
    ("llama-190m", 1, 512): _step(0.085, 0.415, 0.252),
    ("llama-190m", 1, 2048): _step(0.101, 0.481, 0.306),
    ("llama-190m", 1, 16384): _step(0.250, 0.741, 0.570),
    ("llama-190m", 8, 512): _step(0.122, 0.498, 0.407),
    ("llama-190m", 8, 2048): _step(0.250, 0.727, 0.73),
    ("llama-190m", 32, 512): _step(0.250, 0.605, 0.529),
    ("llama-190m", 32, 2048): _step(0.763, 1.190, 1.19),
    ("llama-190m", 64, 512): _step(0.421, 0.923, 0.800),
    ("llama-190m", 64, 2048): _step(1.447, 1.993, 1.877),
    ("llama-190m", 256, 512): _step(1.447, 2.004, 1.945),
    ("llama-190m", 256, 2048): _step(5.551, 6.446, 6.394),
    ("llama-1b", 1, 512): _step(0.528, 0.983, 0.799),
    ("llama-1b", 1, 2048): _step(0.539, 1.014, 0.833),
    ("llama-1b", 1, 16384): _step(0.639, 1.206, 1.023),
    ("llama-1b", 8, 512): _step(0.553, 1.072, 0.957),
    ("llama-1b", 8, 2048): _step(0.639, 1.339, 1.124),
    ("llama-1b", 32, 512): _step(0.639, 1.226, 1.114),
    ("llama-1b", 32, 2048): _step(0.981, 1.637, 1.63),
    ("llama-1b", 64, 512): _step(0.753, 1.323, 1.205),
    ("llama-1b", 64, 2048): _step(1.437, 2.050, 1.932),
    ("llama-1b", 256, 512): _step(1.437, 2.515, 2.515),
    ("llama-1b", 256, 2048): _step(4.172, 5.554, 5.537),
    ("llama-8b", 1, 512): _step(3.201, 4.305, 3.788),
    ("llama-8b", 1, 2048): _step(3.244, 4.404, 3.884),
    ("llama-8b", 1, 16384): _step(3.643, 4.929, 4.396),
    ("llama-8b", 8, 512): _step(3.301, 4.565, 4.286),
    ("llama-8b", 8, 2048): _step(3.643, 5.146, 4.745),
    ("llama-8b", 32, 512): _step(3.643, 5.007, 4.681),
    ("llama-8b", 32, 2048): _step(5.011, 6.581, 6.58),
    ("llama-8b", 64, 512): _step(4.099, 5.601, 5.281),
    ("llama-8b", 64, 2048): _step(6.834, 8.419, 8.100),
    ("llama-8b", 256, 512): _step(6.834, 10.925, 10.92),
    ("llama-8b", 256, 2048): _step(17.78, 22.16, 22.16),
}
STEP_OVER_PROTOTYPE = Target(relation="<=", value=1.05)
DRAWN_OVER_GREEDY = Target(relation="<=", value=1.1)  # at 64: top_k, top_p and a seed in every request
HOST_US = {64: Target(relation="<=", value=300)}  # host time of a steady decode step, by batch size
