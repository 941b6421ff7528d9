"""Where min_p, top_k and top_p cut a row of logits: one number a row, and what is not below it may be drawn.

In this order: min_p leaves logits from `highest + temperature * log(min_p)` on, top_k those from the k-th largest on,
and top_p the fewest of the likeliest of what is left that weigh `top_p` of it. Logits equal to the last that is kept
are kept too. Weights are whole numbers of 2**-40 of the likeliest token's, so their sums, and with them the cut, are
the same in any order, batch or chunking, and the kernels' thresholds are the plain version's to the bit. Nothing is
sorted, and nothing is read back.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._arguments import check_device, check_floats, debugging
from weft.kernels._jit import cdiv, early_launch, next_power_of_2
from weft.kernels._truncate_kernels import bound_kernel, choose_kernel, fill_kernel, highest_kernel
from weft.kernels._truncate_reference import LOGARITHM_TERMS, reference
from weft.kernels.specialisation import Specialisation

__all__ = ["BLOCK", "SPECIALISATIONS", "reference", "thresholds"]

BLOCK = 2048
GROUP = 64
_WARPS = 8

# Digits of the 32 bits of a key, from the highest: as many bits as numbers of the dtype, as float32, differ in.
_DIGITS = {torch.float32: (11, 11, 10), torch.bfloat16: (11, 5), torch.float16: (11, 8)}


def thresholds(
    logits: Float[Tensor, "R V"],
    temperatures: Float[Tensor, "R"],
    top_k: Int[Tensor, "R"],
    top_p: Float[Tensor, "R"],
    min_p: Float[Tensor, "R"],
) -> Float[Tensor, "R"]:
    """The threshold of each row in float32; -inf where nothing is cut: at temperature 0, and in a broken row.

    top_k: 0 for all, or int64 from 1 on.   top_p: 1 for all.   min_p: 0 for all.
    Raises: KernelError for shapes and dtypes that do not fit; with WEFT_DEBUG=1 also for values out of range.
    """
    count, vocab_size = _checked(logits, temperatures, top_k, top_p, min_p)
    device = logits.device
    found = torch.empty(count, dtype=torch.float32, device=device)
    if not count:
        return found
    forms, blocks = _forms(logits.dtype), cdiv(vocab_size, BLOCK)
    num_cells, groups = sum(1 << form["BITS"] for form in forms), blocks * (BLOCK // GROUP)
    cells = torch.zeros(2, count, num_cells, dtype=torch.int64, device=device)
    state = torch.empty(count, 2, dtype=torch.int64, device=device)
    tops = torch.empty(count, dtype=torch.float32, device=device)
    highest = torch.empty(count, groups, dtype=torch.float32, device=device)
    columns = temperatures, top_k, top_p
    options = {"num_warps": _WARPS, "enable_fp_fusion": False, **early_launch(device)}
    highest_kernel[(count, blocks)](
        logits, logits.stride(0), *columns, min_p, highest, vocab_size, BLOCK=BLOCK, GROUP=GROUP, **options
    )
    bound_kernel[(count,)](
        *columns,
        min_p,
        highest,
        tops,
        found,
        state,
        vocab_size,
        groups,
        TERMS=LOGARITHM_TERMS,
        GROUPS=next_power_of_2(groups),
        **options,
    )
    for mass in (False, True):
        sums = cells[int(mass)]
        for digit, form in enumerate(forms):
            fill_kernel[(count, blocks)](
                logits,
                logits.stride(0),
                *columns,
                highest,
                tops,
                found,
                sums,
                state,
                vocab_size,
                num_cells,
                **form,
                FIRST=digit == 0,
                MASS=mass,
                BLOCK=BLOCK,
                GROUP=GROUP,
                **options,
            )
            choose_kernel[(count,)](
                *columns,
                tops,
                found,
                sums,
                state,
                vocab_size,
                num_cells,
                **form,
                FIRST=digit == 0,
                LAST=digit == len(forms) - 1,
                MASS=mass,
                **options,
            )
    return found


def _forms(dtype: torch.dtype) -> list[dict[str, int]]:
    """Where each digit's cells begin, by how much a key is shifted to it, and how many bits it has."""
    forms, offset, shift = [], 0, 32
    for bits in _DIGITS[dtype]:
        shift -= bits
        forms.append({"OFFSET": offset, "SHIFT": shift, "BITS": bits})
        offset += 1 << bits
    return forms


def _checked(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[int, int]:
    if logits.ndim != 2 or logits.stride(1) != 1 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise KernelError(
            f"logits must be [R, V] floats with dense rows, got {logits.dtype} of shape {tuple(logits.shape)}"
        )
    count, vocab_size = logits.shape
    columns = {"temperatures": temperatures, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, tensor in columns.items():
        dtype = torch.int64 if name == "top_k" else torch.float32
        if tensor.shape != (count,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise KernelError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not a contiguous {dtype} [{count}]")
    check_device("logits", logits, others=columns)
    check_floats("logits", logits)
    if debugging():
        for name, right, words in (
            ("temperatures", (temperatures >= 0) & temperatures.isfinite(), "no number from 0 on"),
            ("top_k", top_k >= 0, "no whole number from 0 on"),
            ("top_p", (top_p > 0) & (top_p <= 1), "outside (0, 1]"),
            ("min_p", (min_p >= 0) & (min_p <= 1), "outside [0, 1]"),
        ):
            wrong = (~right).nonzero()
            if len(wrong):
                place = int(wrong[0, 0])
                raise KernelError(f"{name}[{place}]={columns[name][place].item()} is {words}")
    return count, vocab_size


_TYPES = {
    **dict.fromkeys(("temperatures", "top_p", "min_p", "highest", "tops", "thresholds"), "*fp32"),
    **dict.fromkeys(("top_k", "cells", "state"), "*i64"),
    **dict.fromkeys(("stride", "vocab_size", "groups", "num_cells"), "i32"),
}


def _specialisations(dtype: torch.dtype, name: str, *, early: bool = True) -> list[Specialisation]:
    found = []

    def add(step: str, kernel: Any, aligned: set[str], constants: dict[str, Any]) -> None:
        found.append(
            Specialisation(
                name=f"{step}-{name}{'-early' if early else ''}",
                kernel=kernel,
                signature={**_TYPES, "logits": f"*{name}"},
                constants={**constants, "EARLY": early},
                num_warps=_WARPS,
                num_stages=3,
                aligned=frozenset(aligned),
                capabilities=(90, 100) if early else (80, 89),
                waits=early,
                options={"enable_fp_fusion": False},
            )
        )

    row, block = {"tops", "thresholds", "state", "vocab_size"}, {"logits", "stride", "highest", "vocab_size"}
    tile = {"BLOCK": BLOCK, "GROUP": GROUP}
    add("highest", highest_kernel, block, tile)
    add("bound", bound_kernel, row | {"highest", "groups"}, {"TERMS": LOGARITHM_TERMS, "GROUPS": 2048})
    forms = _forms(dtype)
    for mass in (False, True):
        for digit, form in enumerate(forms):
            one, step = {**form, "FIRST": digit == 0, "MASS": mass}, f"{'mass' if mass else 'count'}-{digit}"
            add(f"fill-{step}", fill_kernel, row | block | {"cells", "num_cells"}, {**one, **tile})
            last = {"LAST": digit == len(forms) - 1}
            add(f"choose-{step}", choose_kernel, row | {"cells", "num_cells"}, {**one, **last})
    return found


SPECIALISATIONS = (
    *_specialisations(torch.bfloat16, "bf16"),
    *_specialisations(torch.float32, "fp32"),
    *_specialisations(torch.float16, "fp16"),
    *_specialisations(torch.bfloat16, "bf16", early=False),
)
