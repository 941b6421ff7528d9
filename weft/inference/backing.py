"""What backs a model's operations and its attention, chosen from options and machine before weights are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.attention import PREFERRED, find_backend
from weft.attention.interface import AttentionBackend, AttentionSpec, HasFixedOrder
from weft.config import ExecutionConfig
from weft.errors import ConfigError
from weft.inference.placement import Placement
from weft.kernels._jit import interpreting, runs_on
from weft.layers.fixed_order import FixedOrderOperations, block_sizes
from weft.layers.fused import FusedOperations
from weft.layers.kernel_choice import batch_invariant, forced
from weft.layers.linear import Linear
from weft.layers.operations import Attend, Operations, PlainOperations
from weft.models.family import Model


@dataclass(frozen=True, kw_only=True)
class Backing:
    """name: of the operations, in words.   operations: makes one step's of its attention.   is_plain: in torch alone.

    batch_invariant: nothing but a request's own sequence may show in its bits.
    check_shapes: raises ConfigError if a model's products cannot keep that, told from the model without its weights.
    fit: the operations for a model whose weights are there; raises ConfigError if its products cannot keep that on this
        machine. A cache looks after itself.
    """

    name: str
    operations: Callable[[Attend], Operations[Any]]
    is_plain: bool
    batch_invariant: bool = False
    check_shapes: Callable[[Model, Placement], None] | None = None
    fit: Callable[[Model, Placement], Callable[[Attend], Operations[Any]]] | None = None

    def operations_for(self, model: Model, placement: Placement) -> Callable[[Attend], Operations[Any]]:
        """What makes a step's operations, by a look at the model where that is needed. Raises: ConfigError."""
        return self.operations if self.fit is None else self.fit(model, placement)

    def attention(self, name: str, specs: Sequence[AttentionSpec], placement: Placement) -> AttentionBackend:
        """The backend asked for, or the first of the preferred ones that can do every layer. Raises: ConfigError."""
        reasons, is_order_missing = {}, False
        for backend in (find_backend(known) for known in (PREFERRED if name == "auto" else (name,))):
            reason = next(filter(None, (backend.supports(s, placement.dtype, placement.device) for s in specs)), None)
            if reason is None and not self.batch_invariant:
                return backend
            if reason is None and isinstance(backend, HasFixedOrder):
                return backend.in_fixed_order()
            is_order_missing = is_order_missing or reason is None
            reasons[backend.name] = reason or "its sums have no fixed order, which batch_invariant=True asks for"
        here = f"this model on {placement.device} in {str(placement.dtype).removeprefix('torch.')}"
        if name == "auto":
            hint = "a backend of your own can: docs/conformance.md"
            listed = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
            message = f"no attention backend can run {here}: {listed}"
        else:
            hint = "attention_backend='auto' takes the first that can"
            message = f"attention_backend={name!r} cannot run {here}: {reasons.popitem()[1]}"
        raise ConfigError(message, hint=f"batch_invariant=False, or {hint}" if is_order_missing else hint)


def back(config: ExecutionConfig, placement: Placement) -> Backing:
    """The operations that were asked for. Raises: ConfigError where they cannot run, or another option says nothing."""
    asked, choice, device = config.operations, config.kernel_choice, placement.device
    is_invariant = config.batch_invariant is True
    if is_invariant and choice != "auto":
        raise ConfigError(
            f"kernel_choice={choice!r} and batch_invariant=True choose each in their own way",
            hint="kernel_choice='auto', or batch_invariant=False",
        )
    is_plain = asked == "plain" or (asked == "auto" and not (device.type == "cuda" and runs_on(device)))
    if choice != "auto" and (is_plain or placement.prepacked):  # who forces a kernel is not to measure another
        what = f"operations={asked!r} on {device}" if is_plain else "prepacked linear layers, which multiply themselves"
        raise ConfigError(
            f"kernel_choice={choice!r} has no effect on {what}",
            hint="operations='fused' and cpu_linear='plain', or kernel_choice='auto'"
            if runs_on(device)
            else "kernel_choice='auto': what can be forced runs on CUDA",
        )
    if is_plain and is_invariant:
        return Backing(
            name="batch-invariant plain",
            operations=FixedOrderOperations,
            is_plain=True,
            batch_invariant=True,
            fit=_in_blocks,
        )
    if is_plain:
        return Backing(name="plain", operations=PlainOperations, is_plain=True)
    if not runs_on(device):
        raise ConfigError(
            f"operations='fused' are Triton kernels, which do not run on {device} here",
            hint="operations='plain' runs anywhere",
        )
    if interpreting() and placement.dtype == torch.bfloat16:
        raise ConfigError(
            "operations='fused' with dtype='bfloat16': Triton's interpreter computes bfloat16 wrongly",
            hint="dtype='float32', or operations='plain'",
        )
    if is_invariant and placement.prepacked:
        raise ConfigError(
            "batch_invariant=True with fused operations multiplies by plain linear layers, and these are prepacked",
            hint="cpu_linear='plain', or operations='plain'",
        )
    if is_invariant:
        return Backing(
            name="batch-invariant fused",
            operations=partial(FusedOperations, choose=batch_invariant),
            is_plain=False,
            batch_invariant=True,
            check_shapes=_check_widths,
        )
    if choice == "auto":
        return Backing(name="fused", operations=FusedOperations, is_plain=False)
    return Backing(name=f"fused ({choice})", operations=partial(FusedOperations, choose=forced(choice)), is_plain=False)


def _in_blocks(model: Model, placement: Placement) -> Callable[[Attend], Operations[Any]]:
    assert isinstance(model, nn.Module)
    return partial(FixedOrderOperations, sizes=block_sizes(model, placement.dtype, placement.device))


def _check_widths(model: Model, placement: Placement) -> None:
    """The one kernel of that mode reads rows of whole 16 bytes."""
    assert isinstance(model, nn.Module)
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.in_features * placement.dtype.itemsize % 16:
            raise ConfigError(
                f"batch_invariant=True cannot multiply by {name} [{module.out_features}, {module.in_features}]: its "
                "rows are no multiple of 16 bytes",
                hint="operations='plain' multiplies by any, slowly; or batch_invariant=False",
            )
