"""Attention for training, causal: weft, SDPA, all scores in a matrix, and what `torch.compile` makes of that."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from weft import __version__
from weft.benchmark.kernels.arithmetic import backward_flops, causal_flops
from weft.benchmark.kernels.contender import Contender, Measured, Place, measure, ratio, skipped
from weft.benchmark.kernels.peers import BACKENDS, naive, naive_bytes, sdpa, version_of
from weft.benchmark.row import Row, Target
from weft.kernels.flash_attention import attention_reference, flash_attention

NOTE = (
    "training attention: rates count 2 operations a multiplication over half of the scores, backward 2.5 times as "
    "many; extra memory is what a call holds at its peak beyond inputs, output, row sums and gradients; that of "
    "backward is of forward and backward together; errors are root mean squares against float64 in two heads"
)
_TOTAL = 32_768  # tokens of a batch
_RATES = {128: Target(relation=">=", value=400), 64: Target(relation=">=", value=340)}
_RATE_FROM = 4096  # the length from which a rate is asked for
_NEVER_SLOWER = Target(relation=">=", value=1.0)
_MEMORY = Target(relation="<=", value=2.0)
_COMPILED, _NAIVE = "torch.compile of naive", "naive"
_COMPILED_TO = 4096

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """As many heads of keys as of queries."""

    batch: int
    length: int
    heads: int
    head_dim: int

    @property
    def flops(self) -> float:
        return causal_flops(
            batch=self.batch, num_queries=self.length, prefix=0, heads=self.heads, head_dim=self.head_dim
        )

    @property
    def num_scores(self) -> int:
        return self.batch * self.heads * self.length**2


SHAPES = tuple(
    TrainingShape(batch=_TOTAL // length, length=length, heads=heads, head_dim=head_dim)
    for heads, head_dim in ((16, 128), (32, 64))
    for length in (1024, 2048, 4096, 8192, 16_384)
)


class TrainingAttention:
    """Measures shapes one after another.

    naive_limit: bytes past which `naive` is left out.   compile_seconds: how long compiling may take in all.
    weft: what is measured as weft; tests plant faults there.
    """

    def __init__(
        self, place: Place, *, naive_limit: int, compile_seconds: int | float, weft: Attend | None = None
    ) -> None:
        self._place = place
        self._naive_limit = naive_limit
        self._compile_left = float(compile_seconds)
        self._weft: Attend = weft or (lambda query, key, value: flash_attention(query, key, value, causal=True)[0])

    def rows(self, shape: TrainingShape) -> list[Row]:
        """Of every system, then what weft is beside SDPA."""
        place = self._place.case(
            f"training attention, {shape.batch} x {shape.length}, {shape.heads} heads of {shape.head_dim}"
        )
        generator = torch.Generator(device=place.device).manual_seed(place.row.seed or 0)
        sizes = (shape.batch, shape.length, shape.heads, shape.head_dim)
        inputs = [torch.randn(sizes, generator=generator, dtype=place.dtype, device=place.device) for _ in range(4)]
        truth = _truth(inputs)
        done: dict[tuple[str, str], Measured] = {}
        self._attention("weft", __version__, self._weft, shape, inputs, truth, place, done)
        for system in BACKENDS:
            self._attention(system, version_of(system), _over_heads(system), shape, inputs, truth, place, done)
        self._naive(shape, inputs, truth, place, done)
        row = place.row.by("weft over a peer", "")
        return [
            *(line for one in done.values() for line in one.rows),
            *(
                line
                for operation in ("forward", "backward")
                for system in BACKENDS
                for line in ratio(
                    row,
                    f"{operation} as fast as {system}",
                    done.get((system, operation)),
                    done.get(("weft", operation)),
                    _NEVER_SLOWER if system == "sdpa flash" else None,
                )
            ),
        ]

    def _naive(
        self,
        shape: TrainingShape,
        inputs: Sequence[Tensor],
        truth: "_Truth",
        place: Place,
        done: dict[tuple[str, str], Measured],
    ) -> None:
        turned = [tensor.transpose(1, 2).contiguous() for tensor in inputs]
        for operation in ("forward", "backward"):
            need = naive_bytes(shape.num_scores, backward=operation == "backward")
            if need > self._naive_limit:
                reason = f"about {need / 2**30:.0f} GiB, the limit is {self._naive_limit / 2**30:.0f}"
                for system in (_NAIVE, _COMPILED) if operation == "forward" else (_NAIVE,):
                    row = place.row.by(system, torch.__version__)
                    done[system, operation] = skipped(row, operation, reason)
                continue
            contender = _contender(_NAIVE, torch.__version__, naive, operation, shape, turned, heads_first=True)
            done[_NAIVE, operation] = measure(contender, truth.of(operation), place)
            if operation == "forward":
                done[_COMPILED, operation] = self._compiled(shape, turned, truth, place)

    def _compiled(self, shape: TrainingShape, turned: Sequence[Tensor], truth: "_Truth", place: Place) -> Measured:
        row = place.row.by(_COMPILED, torch.__version__)
        if shape.length > _COMPILED_TO:
            return skipped(row, "forward", f"longer than {_COMPILED_TO}, to bound the time of the run")
        if self._compile_left <= 0:
            return skipped(row, "forward", "the time for compiling is spent")
        started = perf_counter()
        compiled: Attend = torch.compile(naive, dynamic=False)
        contender = _contender(_COMPILED, torch.__version__, compiled, "forward", shape, turned, heads_first=True)
        measured = measure(contender, truth.forward, place)
        self._compile_left -= perf_counter() - started
        return measured

    def _attention(
        self,
        system: str,
        version: str,
        attend: Attend,
        shape: TrainingShape,
        inputs: Sequence[Tensor],
        truth: "_Truth",
        place: Place,
        done: dict[tuple[str, str], Measured],
    ) -> None:
        heads_first = system != "weft"
        given = [tensor.transpose(1, 2).contiguous() for tensor in inputs] if heads_first else inputs
        for operation in ("forward", "backward"):
            target = _RATES.get(shape.head_dim) if operation == "forward" and shape.length >= _RATE_FROM else None
            contender = _contender(system, version, attend, operation, shape, given, heads_first=heads_first)
            done[system, operation] = measure(
                contender,
                truth.of(operation),
                place,
                rate_target=target if system == "weft" else None,
                memory_target=_MEMORY if system == "weft" else None,
            )


@dataclass(frozen=True, kw_only=True)
class _Truth:
    forward: list[Tensor]
    backward: list[Tensor]

    def of(self, operation: str) -> list[Tensor]:
        return self.forward if operation == "forward" else self.backward


def _heads(tensor: Tensor) -> Iterator[Tensor]:
    """The first head of the first sequence and the last of the last, `[1, N, 1, D]` of `[B, N, H, D]`."""
    yield tensor[:1, :, :1]
    yield tensor[-1:, :, -1:]


def _truth(inputs: Sequence[Tensor]) -> _Truth:
    """Output and gradients in float64, of the heads that are compared."""
    outputs, gradients = [], []
    for few in zip(*map(_heads, inputs), strict=True):
        leaves = [tensor.double().requires_grad_() for tensor in few[:3]]
        output = attention_reference(*leaves, causal=True)[0]
        outputs.append(output.detach())
        gradients.append(torch.autograd.grad(output, leaves, few[3].double()))
    return _Truth(forward=outputs, backward=[one for each in zip(*gradients, strict=True) for one in each])


def _over_heads(system: str) -> Attend:
    return lambda query, key, value: sdpa(system, query, key, value, causal=True)


def _contender(
    system: str,
    version: str,
    attend: Attend,
    operation: str,
    shape: TrainingShape,
    inputs: Sequence[Tensor],
    *,
    heads_first: bool,
) -> Contender:
    """heads_first: inputs are `[B, H, N, D]`, not `[B, N, H, D]`."""
    *tensors, output_gradient = inputs
    row_sums = 4 * shape.batch * shape.heads * shape.length

    def seen(result: Tensor) -> list[Tensor]:
        return list(_heads(result.transpose(1, 2) if heads_first else result))

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*tensors)

    if operation == "forward":
        return Contender(
            system=system,
            version=version,
            operation=operation,
            calls=[forward],
            result=lambda: seen(forward()),
            graph=system in ("weft", *BACKENDS),
            amount=shape.flops,
            rate_unit="TFLOP/s",
            needed_bytes=output_gradient.nbytes + row_sums,
        )
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    kept: list[Tensor] = []

    def step() -> Sequence[Tensor]:
        return torch.autograd.grad(attend(*leaves), leaves, output_gradient)

    def backward() -> Sequence[Tensor]:
        if not kept:  # forward once, inside what is guarded against errors
            kept.append(attend(*leaves))
        return torch.autograd.grad(kept[0], leaves, output_gradient, retain_graph=True)

    def both() -> Sequence[Tensor]:
        kept.clear()  # what an earlier forward saved is none of this step's
        return step()

    return Contender(
        system=system,
        version=version,
        operation=operation,
        calls=[backward],
        result=lambda: [head for gradient in backward() for head in seen(gradient)],
        graph=False,  # autograd goes back on the stream it came on
        amount=backward_flops(shape.flops),
        rate_unit="TFLOP/s",
        memory_call=both,
        needed_bytes=4 * output_gradient.nbytes + row_sums,
    )
