"""Cross-entropy of tokens without their logits ever existing whole: the head and the loss, a chunk of rows at a time.

For each chunk the product with the head is made, one program a row turns it in place into the gradient of the logits
and leaves the row's loss, and two more products take that gradient back; memory is one chunk of logits. Loss and
softmax are float32; the gradient of the logits is rounded to their dtype, as the plain order rounds it, and the
gradients of its inputs once at the end.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from weft.errors import KernelError
from weft.kernels._arguments import check_count, check_device, check_floats, check_range, debugging
from weft.kernels._jit import jit, tl
from weft.kernels.specialisation import Specialisation

BLOCK = 4096
IGNORED = -100  # the target of a row that counts for nothing


def reference(hidden: Float[Tensor, "T E"], head: Float[Tensor, "V E"], targets: Int[Tensor, "T"]) -> Float[Tensor, ""]:
    """The mean over rows that count, in plain torch: the product in the inputs' dtype, the loss in float32 at least."""
    logits = functional.linear(hidden, head)
    return functional.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


@jit
def _cross_entropy_kernel(logits, stride, targets, losses, vocab_size, BLOCK: tl.constexpr, IGNORED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    line = logits + row * stride
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        values = tl.load(line + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(maximum, values)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(maximum - shift) + tl.exp(values - shift)
        maximum = highest
    top = tl.max(maximum, 0)
    log_sum = tl.log(tl.sum(total * tl.exp(maximum - top), 0))  # apart from `top`, beside which it would be rounded
    there = (target >= 0) & (target < vocab_size)
    logit = tl.load(line + target, mask=there, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(target == IGNORED, 0.0, top - logit + log_sum))
    # Scaled at the end: float16 keeps small weights.
    factor = tl.where(target == IGNORED, 0.0, tl.where(there, 1.0, float("nan")))
    tl.debug_barrier()  # the target's logit is read before it is overwritten
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab_size
        values = tl.load(line + token, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(values - top - log_sum) - tl.where(token == target, 1.0, 0.0)) * factor
        tl.store(line + token, gradient.to(logits.dtype.element_ty), mask=inside)


class _CrossEntropy(torch.autograd.Function):
    """The gradients are made on the way forward, while the logits of a chunk are there."""

    @staticmethod
    def forward(ctx: object, hidden: Tensor, head: Tensor, targets: Tensor, chunk: int) -> Tensor:
        count = len(hidden)
        scale = 1.0 / (targets != IGNORED).sum(dtype=torch.float32)
        losses = torch.empty(count, dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden, dtype=torch.float32)
        head_gradient = torch.zeros_like(head, dtype=torch.float32)
        for start in range(0, count, chunk):
            rows = slice(start, start + chunk)
            logits = functional.linear(hidden[rows], head)
            _cross_entropy_kernel[(len(logits),)](
                logits,
                logits.stride(0),
                targets[rows],
                losses[rows],
                logits.shape[1],
                BLOCK=BLOCK,
                IGNORED=IGNORED,
                num_warps=8,
            )
            hidden_gradient[rows] = _wide_product(logits, head)
            head_gradient += _wide_product(logits.T, hidden[rows])
        ctx.save_for_backward(hidden_gradient, head_gradient, scale)  # type: ignore[attr-defined]
        ctx.dtype = hidden.dtype  # type: ignore[attr-defined]
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, head, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        dtype, factor = ctx.dtype, gradient * scale  # type: ignore[attr-defined]
        return (hidden * factor).to(dtype), (head * factor).to(dtype), None, None


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """A product that stays in float32, since it is summed over chunks and scaled before it is rounded."""
    if left.device.type == "cuda" and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def cross_entropy(
    hidden: Float[Tensor, "T E"], head: Float[Tensor, "V E"], targets: Int[Tensor, "T"], *, chunk: int = 1024
) -> Float[Tensor, ""]:
    """Mean loss over rows whose target is not IGNORED (NaN if none counts), differentiable in `hidden` and `head`.

    chunk: rows whose logits exist at once.
    Whether a target lies in the vocabulary is checked on a CPU, and on a GPU, where that waits for the device, only
    with WEFT_DEBUG=1 in the environment; unchecked, such a target makes the loss and its row's gradient NaN.
    Raises: KernelError for shapes, dtypes and devices that do not fit.
    """
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1] or hidden.dtype != head.dtype:
        raise KernelError(
            f"hidden is {hidden.dtype} {tuple(hidden.shape)}, head {head.dtype} {tuple(head.shape)}: "
            "[T, E] and [V, E] of one dtype are wanted"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64 or not targets.is_contiguous():
        raise KernelError(f"targets is {targets.dtype} {tuple(targets.shape)}, not contiguous int64 [{len(hidden)}]")
    check_count("chunk", chunk)
    check_device("hidden", hidden, others={"head": head, "targets": targets})
    check_floats("hidden", hidden)
    if len(head) == 0:
        raise KernelError(f"head has shape {tuple(head.shape)}: an empty vocabulary has no loss")
    if targets.device.type != "cuda" or debugging():
        check_range("targets", torch.where(targets == IGNORED, 0, targets), 0, len(head) - 1)
    loss: Tensor = _CrossEntropy.apply(hidden, head, targets, chunk)
    return loss


SPECIALISATIONS = tuple(
    Specialisation(
        name=dtype,
        kernel=_cross_entropy_kernel,
        signature={
            "logits": f"*{dtype}",
            "stride": "i32",
            "targets": "*i64",
            "losses": "*fp32",
            "vocab_size": "i32",
        },
        constants={"BLOCK": BLOCK, "IGNORED": IGNORED},
        num_warps=8,
        num_stages=3,
        aligned=frozenset({"logits", "stride", "vocab_size"}),
    )
    for dtype in ("bf16", "fp32")
)
