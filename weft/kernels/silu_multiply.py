"""`silu(gate) * up` of packed rows, computed in float32 and rounded once, where the plain order rounds silu as well."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from weft.errors import KernelError
from weft.kernels._arguments import check_device, check_floats
from weft.kernels._jit import cdiv, early_launch, jit, tl
from weft.kernels.pieces import exponential
from weft.kernels.specialisation import Specialisation

BLOCK = 1024


def reference(gate_up: Float[Tensor, "T 2*I"]) -> Float[Tensor, "T I"]:
    """The same in plain torch, in HuggingFace's order of casts."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate.contiguous()) * up


@jit
def silu(x):
    """`x * sigmoid(x)` of float32 values, by the sign for which the exponential does not overflow."""
    decay = exponential(-tl.abs(x))
    return tl.div_rn(x * tl.where(x < 0, decay, 1.0), 1.0 + decay)


@jit
def _silu_multiply_kernel(gate_up, stride, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    result = (silu(gate) * up).to(out.dtype.element_ty)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + row * width + column, result, mask=inside)


def silu_multiply(gate_up: Float[Tensor, "T 2*I"]) -> Float[Tensor, "T I"]:
    """Rows hold the gate, then what it gates. Raises: KernelError for shapes and strides that do not fit."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise KernelError(
            f"gate_up has shape {tuple(gate_up.shape)} and strides {gate_up.stride()}", hint="[T, 2 * I], rows dense"
        )
    check_device("gate_up", gate_up)
    check_floats("gate_up", gate_up)
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    if count and width:
        _silu_multiply_kernel[(count, cdiv(width, BLOCK))](
            gate_up, gate_up.stride(0), out, width, BLOCK=BLOCK, num_warps=4, **early_launch(gate_up.device)
        )
    return out


SPECIALISATIONS = tuple(
    Specialisation(
        name=dtype + ("-early" if early else ""),
        kernel=_silu_multiply_kernel,
        signature={"gate_up": f"*{dtype}", "stride": "i32", "out": f"*{dtype}", "width": "i32"},
        constants={"BLOCK": BLOCK, "EARLY": early},
        num_warps=4,
        num_stages=3,
        aligned=frozenset({"gate_up", "stride", "out", "width"}),
        capabilities=(90, 100) if early else (80, 89),
        waits=early,
    )
    for dtype in ("bf16", "fp16", "fp32")
    for early in (True, False)
)
