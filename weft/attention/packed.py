"""Attention over whole sequences side by side, as training and scoring call it.

In fixed order a sequence's bits are those of an engine that serves it batch-invariantly, whatever is packed beside it.
`packed` is plain torch with no cache, gradients included; `packed_on` is a backend's own forward pass.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.attention.fixed_order import FixedOrderAttend
from weft.attention.interface import AttentionBackend, AttentionSpec
from weft.attention.ragged import RaggedAttend, Span
from weft.batch import Batch, GroupTables, SamplingRows
from weft.config import CacheConfig, Limits
from weft.errors import ConfigError
from weft.layers.heads import HeadTransform
from weft.layers.operations import Attend
from weft.options import positive


class PackedStore:
    """The keys and values of one layer at a time, as they were made: autograd sees through them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._written: tuple[int, Tensor, Tensor] | None = None

    def write(self, layer: int, key: Float[Tensor, "T_total H_kv D"], value: Float[Tensor, "T_total H_kv D"]) -> None:
        if len(key) != self._spans[-1].last:
            raise ConfigError(
                f"packed sequences have {self._spans[-1].last} tokens, and {len(key)} came",
                hint="as many rows as the lengths say",
            )
        self._written = layer, key, value

    def read(
        self, layer: int, window: int | None
    ) -> Iterator[tuple[Float[Tensor, "1 H_kv S D"], Float[Tensor, "1 H_kv S D"]]]:
        """A window reaches back to the first token: a span here is a whole sequence."""
        assert self._written is not None, "nothing was written"
        assert self._written[0] == layer, f"layer {layer} reads what layer {self._written[0]} wrote"
        for span in self._spans:
            key, value = (part[span.first : span.last].transpose(0, 1)[None] for part in self._written[1:])
            yield key, value


class WithoutGradients:
    """An Attend whose kernels autograd knows nothing of: what it gave would pass for a constant."""

    def __init__(self, attend: Attend, name: str) -> None:
        self._attend = attend
        self._name = name

    def __call__(
        self,
        layer: int,
        qkv: Float[Tensor, "T_total packed"],
        positions: Int[Tensor, "T_total"],
        heads: HeadTransform,
    ) -> Float[Tensor, "T_total attended"]:
        if torch.is_grad_enabled() and qkv.requires_grad:
            raise ConfigError(
                f"packed_on(backend={self._name!r}) gives no gradients, and its qkv asks for one",
                hint="torch.no_grad() around the forward pass, or `packed`, which has them",
            )
        return self._attend(layer, qkv, positions, heads)


def packed(specs: Sequence[AttentionSpec], lengths: Sequence[int], *, fixed_order: bool = False) -> Attend:
    """The attention of sequences of these lengths, one after another in a batch. specs: one a layer.

    Raises: ConfigError for no sequence, for one without a token, and for a soft cap.
    """
    _check(lengths)
    for spec in specs:
        if spec.soft_cap is not None:
            raise ConfigError(
                f"packed(soft_cap={spec.soft_cap}) would be left out: torch's softmax knows of no cap",
                hint="packed_on a backend with its own softmax, as paged_triton",
            )
    spans, first = [], 0
    for length in lengths:
        spans.append(Span(first, first + length, 0, length))
        first += length
    return (FixedOrderAttend if fixed_order else RaggedAttend)(PackedStore(spans), specs, spans)


def packed_on(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Attend:
    """The same by a backend, as one step whose cache holds these sequences and goes with the Attend: no gradients.

    Raises: ConfigError as `packed`, for what the backend cannot do, and, when it is called, for a gradient asked of it.
    """
    _check(lengths)
    for spec in specs:
        if (reason := backend.supports(spec, dtype, device)) is not None:
            raise ConfigError(
                f"packed_on(backend={backend.name!r}) cannot run this model: {reason}",
                hint="the backend that an engine chose, or `packed`, which is plain torch",
            )
    limits = Limits(max_num_seqs=len(lengths), max_num_batched_tokens=sum(lengths), max_model_len=max(lengths))
    geometry = backend.geometry(limits, CacheConfig())
    cache = backend.allocate(specs, geometry, dtype, device)
    size = geometry.block_size
    tables = torch.arange(geometry.num_blocks).view(len(lengths), -1)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    slots = tables[rows, positions // size] * size + positions % size
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    batch = Batch(
        token_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        sequence_lengths=torch.tensor(lengths, device=device),
        query_starts=torch.tensor([0, *lengths], device=device).cumsum(0),
        groups=(GroupTables(block_tables=tables.to(device), slot_mapping=slots.to(device)),),
        logit_rows=nothing,
        sampling=SamplingRows(temperatures=nothing.float(), seeds=nothing, positions=nothing, any_noise=False),
    )
    return WithoutGradients(cache.prepare(batch), backend.name)


def _check(lengths: Sequence[int]) -> None:
    """A sequence of no token has no place in a step: backends tell decodes by as many tokens as sequences."""
    hint = "leave out sequences without a token"
    if not lengths:
        raise ConfigError("lengths=[] holds no sequence", hint=hint)
    for length in lengths:
        positive("packed", hint, lengths=length)
