"""The compiled forms of the flash-attention kernels, for the check that none spills. Knows no tensor."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from weft.kernels._flash_backward_keys import flash_backward_keys
from weft.kernels._flash_backward_queries import flash_backward_queries
from weft.kernels._flash_delta import flash_delta
from weft.kernels._flash_forward import flash_forward
from weft.kernels._flash_launch import DELTA_ROWS, GROUP
from weft.kernels._flash_tiles import Tiles, candidates, padded_head_dim
from weft.kernels._jit import HAS_TRITON
from weft.kernels.specialisation import CAPABILITIES, Specialisation

_TENSORS = ("query", "key", "value", "output", "output_gradient", "query_gradient", "key_gradient", "value_gradient")
_HEADS = 16  # of the model that forms are compiled for
_SCALARS = ("scale", "score_scale", "inverse_scale")
_KERNELS = {"forward": flash_forward, "keys": flash_backward_keys, "queries": flash_backward_queries}


def _form(
    name: str, kernel: Any, tiles: Tiles, dtype: str, constants: dict[str, Any], capabilities: tuple[int, ...]
) -> Specialisation:
    """A kernel as launched on dense (or, with RAGGED, packed) contiguous tensors."""
    rows = {"query": tiles.block_m, "output_gradient": tiles.block_m, "key": tiles.block_n, "value": tiles.block_n}
    signature: dict[str, str] = {}
    aligned: set[str] = set()
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if argument in rows and tiles.descriptors:
            signature[argument] = f"tensordesc<{dtype}[1, 1, {rows[argument]}, {constants['BLOCK_D']}]>"
            continue
        if argument in ("query_starts", "key_starts"):
            if not constants["RAGGED"]:
                constants = {**constants, argument: None}
                continue
            signature[argument] = "*i32"
        elif argument in _TENSORS:
            signature[argument] = f"*{dtype}"
        elif argument in ("lse", "lse_gradient", "numbers", "slopes"):
            signature[argument] = "*fp32"
        else:
            signature[argument] = "fp32" if argument in _SCALARS else "i32"
        if signature[argument].startswith("*") or "stride" in argument or argument == "width":
            aligned.add(argument)
    return Specialisation(
        name=name,
        kernel=kernel,
        signature=signature,
        constants=constants,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        aligned=frozenset(aligned),
        capabilities=capabilities,
    )


def _all(candidates_too: bool) -> Iterator[Specialisation]:
    plain = tuple(capability for capability in CAPABILITIES if not 90 <= capability < 100)
    # Whether causal, whether packed: all that differs in what a kernel holds; the packed one holds most.
    every, heaviest = ((True, False), (False, False), (True, True)), ((True, True),)
    for capabilities, dtype, itemsize, kinds in (
        (plain, "bf16", 2, heaviest),
        ((90,), "bf16", 2, every),
        ((80, 90), "fp32", 4, heaviest),
    ):
        for head_dim, (causal, ragged) in product((64, 128, 256), kinds):
            tables = candidates(capabilities[-1], head_dim, itemsize, ragged)
            for (direction, kernel), table in zip(_KERNELS.items(), tables, strict=True):
                for tiles in table if candidates_too else table[:1]:
                    constants: dict[str, Any] = {"CAUSAL": causal, "RAGGED": ragged, "DESCRIPTOR": tiles.descriptors}
                    constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
                    constants |= {"BLOCK_D": padded_head_dim(head_dim)}
                    if direction != "forward":
                        constants["GROUP"] = GROUP
                        if direction == "keys":
                            constants["numbers_stride_token"] = _HEADS * head_dim * itemsize // 4
                    kind = ("causal" if causal else "full") + (" packed" if ragged else "")
                    name = f"{direction} D={head_dim} {dtype} {kind} {tiles}" + (
                        " elsewhere" if capabilities == plain else ""
                    )
                    yield _form(name, kernel, tiles, dtype, constants, capabilities)
    for head_dim in (128, 256):
        constants = {"RAGGED": True, "HAS_LSE_GRADIENT": True, "BLOCK_M": DELTA_ROWS, "BLOCK_D": head_dim}
        constants["GROUP"] = GROUP
        yield _form(f"delta D={head_dim}", flash_delta, Tiles(DELTA_ROWS, 0, 8, 1), "bf16", constants, CAPABILITIES)


def forms(*, candidates_too: bool = False) -> tuple[Specialisation, ...]:
    """The forms that are launched on aligned tensors when no tile is forced, or every candidate of the tables."""
    return tuple(_all(candidates_too)) if HAS_TRITON else ()
