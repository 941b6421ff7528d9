"""Which tiles the flash-attention kernels use, by GPU, head dimension and dtype. Knows no tensor and no kernel.

The first choice of a row is the one that is launched, and `tests/kernels/test_compiles.py` sees to it that it spills
no register on Hopper; the others are candidates that a benchmark can force.
"""

import re
from dataclasses import dataclass

from weft.errors import KernelError

LARGEST_HEAD_DIM = 256


@dataclass(frozen=True)
class Tiles:
    """One kernel's tile: query rows x keys, warps and pipeline stages; `descriptors`: loads go through the tensor
    memory accelerator (Hopper and later, 16-bit), else through pointers.

    >>> str(Tiles.parse("128x64 w8 s3 tma"))
    '128x64 w8 s3 tma'
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False

    @classmethod
    def parse(cls, text: str) -> "Tiles":
        """The tile that a text names; KernelError if it names none."""
        found = re.fullmatch(r"(\d+)x(\d+) w(\d+) s(\d+)( tma)?", text.strip())
        if not found:
            raise KernelError(f"no tile is named {text!r}", hint="a tile reads '128x64 w8 s3 tma' or '64x64 w4 s2'")
        block_m, block_n, num_warps, num_stages = (int(number) for number in found.groups()[:4])
        return cls(block_m, block_n, num_warps, num_stages, found[5] is not None)

    def __str__(self) -> str:
        tma = " tma" if self.descriptors else ""
        return f"{self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}{tma}"


@dataclass(frozen=True)
class Choice:
    """The tiles of the three kernels: forward, gradients of keys and values, gradients of queries."""

    forward: Tiles
    keys: Tiles
    queries: Tiles

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """The choice that `forward / keys / queries` names; KernelError if it names none."""
        parts = text.split("/")
        if len(parts) != 3:
            raise KernelError(f"{text!r} names {len(parts)} tiles, not 3", hint="forward / keys / queries")
        return cls(*(Tiles.parse(part) for part in parts))

    def __str__(self) -> str:
        return f"{self.forward} / {self.keys} / {self.queries}"


# Candidates by padded head dimension, best first (D 64 and 128 as measured on an H200 at 8k, bf16, causal): for each of
# the three kernels. Small tiles win: three or four of their blocks share a multiprocessor, and one's softmax runs under
# another's products.
_HOPPER = {
    64: (
        ("64x64 w4 s3 tma", "128x64 w4 s3 tma", "128x64 w8 s3 tma", "64x128 w4 s2 tma", "128x64 w4 s2 tma",
         "128x128 w8 s3 tma", "128x128 w8 s2 tma"),
        ("64x64 w4 s3 tma", "64x64 w4 s2 tma", "128x128 w8 s2 tma", "64x128 w8 s3 tma", "64x128 w8 s2 tma"),
        ("64x64 w4 s3 tma", "64x64 w4 s2 tma", "128x64 w8 s3 tma", "128x128 w8 s2 tma", "128x64 w8 s2 tma"),
    ),
    128: (
        ("64x64 w4 s3 tma", "128x64 w8 s3 tma", "64x64 w4 s2 tma", "128x128 w8 s2 tma", "128x64 w8 s2 tma",
         "64x128 w4 s2 tma"),
        ("64x64 w4 s2 tma", "64x128 w8 s3 tma", "64x128 w8 s2 tma", "64x64 w4 s3 tma", "32x128 w8 s2 tma"),
        ("128x64 w8 s3 tma", "128x128 w8 s2 tma", "64x64 w4 s2 tma", "64x64 w4 s3 tma", "128x64 w8 s2 tma"),
    ),
    256: (("64x64 w8 s2 tma", "64x32 w4 s2 tma"), ("32x32 w8 s1", "32x64 w8 s2 tma"), ("64x32 w8 s2 tma",)),
}  # fmt: skip

# Packed sequences end inside a tile, and the rows behind them have to be silenced: that takes registers.
_HOPPER_PACKED = _HOPPER | {
    128: (_HOPPER[128][0], ("32x128 w8 s2 tma", "64x128 w8 s2 tma"), _HOPPER[128][2]),
    256: (_HOPPER[256][0], ("32x32 w8 s1",), ("32x32 w8 s1", "64x32 w8 s2 tma")),
}

# Without Hopper's instructions; small enough for the 99 KiB of shared memory of an L4.
_PLAIN = {
    64: (("128x64 w4 s3", "64x64 w4 s3"), ("64x64 w8 s2",), ("64x64 w4 s2",)),
    128: (("128x64 w8 s2", "64x32 w4 s3"), ("32x64 w8 s2",), ("64x64 w8 s2",)),
    256: (("64x32 w8 s2",), ("32x32 w8 s1",), ("32x32 w8 s1",)),
}

# fp32 multiplies on the plain cores, exactly: small tiles, since every operand sits in registers.
_SINGLE = {
    64: (("32x32 w4 s1",), ("16x16 w4 s1",), ("16x16 w4 s1",)),
    128: (("16x16 w8 s1",), ("16x16 w8 s1",), ("16x16 w8 s1",)),
    256: (("16x16 w8 s1",), ("16x16 w8 s1",), ("16x16 w4 s1",)),
}

# The interpreter runs a tile as one NumPy operation: larger is faster, and 32 still makes a test cross tiles.
_INTERPRETER = (("32x32 w4 s1",), ("32x32 w4 s1",), ("32x32 w4 s1",))


def padded_head_dim(head_dim: int) -> int:
    """Columns that a kernel computes for a head: the next power of two, at least 16.

    >>> padded_head_dim(80)
    128
    """
    return max(16, 1 << (head_dim - 1).bit_length())


def candidates(capability: int, head_dim: int, itemsize: int, packed: bool) -> tuple[tuple[Tiles, ...], ...]:
    """Tiles of the forward, keys and queries kernels, best first; `capability` 0 is the interpreter."""
    row = max(64, padded_head_dim(head_dim))
    names: tuple[tuple[str, ...], ...]
    if capability == 0:
        names = _INTERPRETER
    elif itemsize == 4:
        names = _SINGLE[row]
    elif 90 <= capability < 100:
        names = (_HOPPER_PACKED if packed else _HOPPER)[row]
    else:
        names = _PLAIN[row]
    return tuple(tuple(Tiles.parse(name) for name in kernel) for kernel in names)


def default_choice(capability: int, head_dim: int, itemsize: int, packed: bool) -> Choice:
    """What is launched when nothing is forced."""
    forward, keys, queries = candidates(capability, head_dim, itemsize, packed)
    return Choice(forward[0], keys[0], queries[0])
