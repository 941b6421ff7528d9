"""Norms, gates, products of few rows, truncation, sampling, the loss, at two models' widths, beside torch's own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from weft import __version__
from weft.benchmark.kernels.arithmetic import copies_beyond_cache
from weft.benchmark.kernels.contender import Contender, Place, measure, ratio
from weft.benchmark.row import Row
from weft.kernels._few_rows_tiles import splits_of
from weft.kernels.add_norm import add_norm
from weft.kernels.cross_entropy import cross_entropy
from weft.kernels.few_rows_gemm import few_rows_gemm
from weft.kernels.gemv import gemv
from weft.kernels.sample import sample
from weft.kernels.silu_multiply import silu_multiply
from weft.kernels.truncate import thresholds

NOTE = (
    "small operations: inputs in turn, together past the L2 cache or 64 sets of them; torch is eager torch captured in "
    "a graph, the loss a loop of calls"
)
_EPSILON = 1e-5
_TOP_K, _TOP_P = 50, 0.9

Operation = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Of a model: the shapes of its matrices follow."""

    name: str
    hidden: int
    inner: int
    packed: int
    vocab_size: int
    loss_tokens: int = 4096

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns, by what they are for."""
        return {
            "qkv": (self.packed, self.hidden),
            "o": (self.hidden, self.hidden),
            "gate-up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "lm_head": (self.vocab_size, self.hidden),
        }


MODELS = (
    Widths(name="1b", hidden=2048, inner=8192, packed=3072, vocab_size=128_256),
    Widths(name="8b", hidden=4096, inner=14_336, packed=6144, vocab_size=128_256),
)


@dataclass(frozen=True, kw_only=True)
class SmallOperation:
    """inputs: shapes of what both are called with, in `dtype` or that of the run.   weight: which of them is a matrix.

    peer: torch's own, called with float64 as well, for the truth.   graph: whether a call can be captured.
    """

    name: str
    inputs: tuple[tuple[int, ...], ...]
    weft: Operation
    peer: Operation
    weight: int | None = None
    dtype: torch.dtype | None = None
    graph: bool = True


def small_operations(widths: Widths) -> Iterator[SmallOperation]:
    """All of a model, in the order in which a step meets them."""
    hidden, inner = widths.hidden, widths.inner
    for count in (1, 64, 2048):
        yield SmallOperation(
            name=f"add_norm, {count} x {hidden}",
            inputs=((count, hidden), (count, hidden), (hidden,)),
            weft=lambda addend, residual, weight: add_norm(addend, residual, weight, _EPSILON),
            peer=_add_norm,
        )
    for count in (1, 64, 2048):
        yield SmallOperation(
            name=f"silu_multiply, {count} x {inner}",
            inputs=((count, 2 * inner),),
            weft=lambda gate_up: [silu_multiply(gate_up)],
            peer=lambda gate_up: [_swiglu(gate_up)],
        )
    for name, (outer, columns) in widths.matrices.items():
        swiglu = name == "gate-up"
        yield SmallOperation(
            name=f"gemv, {name}, 1 row",
            inputs=((1, columns), (outer, columns)),
            weight=1,
            weft=lambda x, weight, swiglu=swiglu: [gemv(x, weight, swiglu=swiglu)],
            peer=_linear_swiglu if swiglu else _linear,
        )
        for count in (8, 64):
            yield _few_rows(name, count, outer, columns)
    for count in (1, 64):
        yield SmallOperation(
            name=f"sample, greedy, {count} x {widths.vocab_size}",
            inputs=((count, widths.vocab_size),),
            dtype=torch.float32,  # in bfloat16 several tokens would be the likeliest
            weft=_greedy(count),
            peer=lambda logits: [logits.argmax(-1)],
        )
    for top_k, name in ((_TOP_K, f"top_k {_TOP_K} and top_p {_TOP_P}"), (0, f"top_p {_TOP_P}")):
        for count in (1, 64):
            yield SmallOperation(
                name=f"truncate, {name}, {count} x {widths.vocab_size}",
                inputs=((count, widths.vocab_size),),
                weft=_truncate(count, top_k),
                peer=lambda logits, top_k=top_k: [_sorted_cut(logits, top_k)],
            )
    yield SmallOperation(
        name=f"cross_entropy with gradients, {widths.loss_tokens} tokens",
        inputs=((widths.loss_tokens, hidden), (widths.vocab_size, hidden)),
        weight=1,
        weft=_loss(cross_entropy),
        peer=_loss(_torch_loss),
        graph=False,
    )


def _few_rows(name: str, count: int, outer: int, columns: int) -> SmallOperation:
    """Whole products; those that a norm follows in planes, and the norm with them."""
    if name in ("o", "down"):
        splits = splits_of(outer, columns)
        return SmallOperation(
            name=f"few_rows_gemm and add_norm, {name}, {count} rows",
            inputs=((count, columns), (outer, columns), (count, outer), (outer,)),
            weight=1,
            weft=lambda x, weight, residual, norm: add_norm(
                few_rows_gemm(x, weight, splits=splits), residual, norm, _EPSILON
            ),
            peer=lambda x, weight, residual, norm: _add_norm(functional.linear(x, weight), residual, norm),
        )
    swiglu = name == "gate-up"
    return SmallOperation(
        name=f"few_rows_gemm, {name}, {count} rows",
        inputs=((count, columns), (outer, columns)),
        weight=1,
        weft=lambda x, weight: [few_rows_gemm(x, weight, swiglu=swiglu)],
        peer=_linear_swiglu if swiglu else _linear,
    )


def small_rows(operation: SmallOperation, widths: Widths, place: Place) -> list[Row]:
    """Times of both and how many times as fast weft is."""
    place = place.case(f"small operations, {widths.name}")
    sets = _input_sets(operation, place)
    expected = operation.peer(*(tensor.double() for tensor in sets[0]))
    contenders = [
        Contender(
            system=system,
            version=version,
            operation=operation.name,
            calls=[partial(run, *given) for given in sets],
            result=partial(run, *sets[0]),
            graph=operation.graph,
            time_unit="µs",
        )
        for system, version, run in (
            ("weft", __version__, operation.weft),
            ("torch", torch.__version__, operation.peer),
        )
    ]
    weft, beside = (measure(contender, expected, place) for contender in contenders)
    row = place.row.by("weft over torch", "")
    return [*weft.rows, *beside.rows, *ratio(row, f"{operation.name} as fast as torch", beside, weft)]


def _input_sets(operation: SmallOperation, place: Place) -> list[list[Tensor]]:
    generator = torch.Generator(device=place.device).manual_seed(place.row.seed or 0)
    dtype = operation.dtype or place.dtype
    size = sum(torch.Size(shape).numel() for shape in operation.inputs) * dtype.itemsize

    def drawn(index: int) -> Tensor:
        shape = operation.inputs[index]
        tensor = torch.randn(shape, generator=generator, dtype=dtype, device=place.device)
        # Products are sums over the columns of a matrix: they stay near 1, and no loss overflows.
        return tensor.mul_(shape[-1] ** -0.5) if index == operation.weight else tensor

    return [[drawn(index) for index in range(len(operation.inputs))] for _ in range(copies_beyond_cache(size))]


def _add_norm(addend: Tensor, residual: Tensor, weight: Tensor) -> Sequence[Tensor]:
    total = residual + addend
    return total, functional.rms_norm(total, weight.shape, weight, _EPSILON)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def _linear(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    return [functional.linear(x, weight)]


def _linear_swiglu(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    return [_swiglu(functional.linear(x, weight))]


def _greedy(count: int) -> Operation:
    kept: list[Tensor] = []  # made once, as an engine does

    def run(logits: Tensor) -> Sequence[Tensor]:
        if not kept:
            zeros = torch.zeros(count, dtype=torch.int64, device=logits.device)
            kept.extend((torch.zeros(count, dtype=torch.float32, device=logits.device), zeros, zeros))
        return [sample(logits, *kept)]

    return run


def _truncate(count: int, top_k: int) -> Operation:
    kept: list[Tensor] = []

    def run(logits: Tensor) -> Sequence[Tensor]:
        if not kept:
            one = torch.ones(count, dtype=torch.float32, device=logits.device)
            kept.extend((one, one.to(torch.int64) * top_k, one * _TOP_P, one * 0))
        return [thresholds(logits, *kept)]

    return run


def _sorted_cut(logits: Tensor, top_k: int) -> Tensor:
    """The same threshold by a sort of the row; what is as likely as the k-th is left, as in weft."""
    values = (logits if logits.dtype == torch.float64 else logits.float()).sort(dim=-1, descending=True).values
    least = min(top_k or values.shape[1], values.shape[1]) - 1
    left = values.masked_fill(values < values[:, least, None], -torch.inf)
    reached = left.softmax(dim=-1).cumsum(dim=-1) >= _TOP_P
    return values.gather(1, reached.int().argmax(dim=-1, keepdim=True))[:, 0]


def _torch_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = functional.linear(hidden, head)
    return functional.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


def _loss(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Operation:
    """The loss and its gradients; a row's target is its number, so that all calls agree on it."""

    def run(hidden: Tensor, head: Tensor) -> Sequence[Tensor]:
        leaves = hidden.detach().requires_grad_(), head.detach().requires_grad_()
        targets = torch.arange(len(hidden), device=hidden.device) % len(head)
        loss = function(leaves[0], leaves[1], targets)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    return run
