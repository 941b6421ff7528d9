"""Random steps over a poisoned pool, what float64 and what torch's own low precision make of them, and the judge."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.accuracy import SINGLE, assert_by_the_rule, assert_within, unit
from weft.kernels import cache_write, paged_decode, paged_prefill
from weft.kernels.paged import HeadRotation, PagedKeys, Scoring
from weft.kernels.paged_decode import NewTokens

LAYER = 1


@dataclass(frozen=True)
class Step:
    """A step of requests of `lengths` tokens, the last `counts` of them new. Slots that nobody owns hold NaN."""

    qkv: Tensor
    pool: Tensor
    tables: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    new: NewTokens
    scoring: Scoring
    num_query_heads: int

    @property
    def starts(self) -> Tensor:
        return torch.tensor([0, *self.counts], device=self.pool.device).cumsum(0)

    def paged(self, pool: Tensor) -> PagedKeys:
        lengths = torch.tensor(self.lengths, device=pool.device)
        return PagedKeys(
            pool=pool, layer=LAYER, block_tables=self.tables, sequence_lengths=lengths, query_starts=self.starts
        )

    def to(self, dtype: torch.dtype) -> "Step":
        rotation = self.new.rotation
        tensors = {
            name: None if (tensor := getattr(rotation, name)) is None else tensor.to(dtype)
            for name in ("cos", "sin", "query_norm", "key_norm")
        }
        new = replace(self.new, rotation=replace(rotation, **tensors))
        return replace(self, qkv=self.qkv.to(dtype), pool=self.pool.to(dtype), new=new)

    def only(self, request: int) -> "Step":
        """The same request without its batch-mates."""
        rows = slice(int(self.starts[request]), int(self.starts[request + 1]))
        new = replace(self.new, positions=self.new.positions[rows], slots=self.new.slots[rows])
        lengths, counts = (self.lengths[request],), (self.counts[request],)
        tables = self.tables[request : request + 1]
        return replace(self, qkv=self.qkv[rows], tables=tables, lengths=lengths, counts=counts, new=new)


def make_step(
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    window: int | None = None,
    soft_cap: float | None = None,
    norm: bool = False,
    magnitude: float = 1.0,
    shared_blocks: int = 0,
) -> Step:
    """shared_blocks: the first blocks of every table are the same ones.   magnitude: of queries and keys."""
    num_query_heads, num_kv_heads = heads
    batch, columns = len(lengths), -(-max(lengths) // block_size) + 2
    owned = torch.randperm(batch * columns + 3)[: batch * columns].reshape(batch, columns)
    owned[:, :shared_blocks] = owned[0, :shared_blocks]
    pool = torch.full((2, 2, batch * columns + 3, block_size, num_kv_heads, head_dim), torch.nan)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for token in range(length - count):
            place = owned[request, token // block_size], token % block_size
            if pool[0, LAYER][place].isnan().any():
                pool[:, LAYER, place[0], place[1]] = torch.randn(2, num_kv_heads, head_dim)
                pool[0, LAYER, place[0], place[1]] *= magnitude
    tables = owned.clone()
    for request, length in enumerate(lengths):
        tables[request, -(-length // block_size) :] = 2**30  # an entry past the end may hold anything
    positions = torch.cat([torch.arange(end - count, end) for end, count in zip(lengths, counts, strict=True)])
    owner = torch.repeat_interleave(torch.arange(batch), torch.tensor(counts))
    slots = owned[owner, positions // block_size] * block_size + positions % block_size
    qkv = torch.randn(len(positions), (num_query_heads + 2 * num_kv_heads) * head_dim)
    qkv[:, : (num_query_heads + num_kv_heads) * head_dim] *= magnitude
    angles = torch.randn(max(lengths) + 1, head_dim // 2)
    weights = [torch.rand(head_dim) + 0.5 if norm else None for _ in range(2)]
    rotation = HeadRotation(
        cos=angles.cos(),
        sin=angles.sin(),
        query_norm=weights[0],
        key_norm=weights[1],
        query_epsilon=1e-5,
        key_epsilon=1e-3,
    )
    moved = HeadRotation(
        **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in vars(rotation).items()}
    )
    step = Step(
        qkv=qkv.to(device),
        pool=pool.to(device),
        tables=tables.to(device),
        lengths=lengths,
        counts=counts,
        new=NewTokens(positions=positions.to(device), slots=slots.to(device), rotation=moved),
        scoring=Scoring(scale=head_dim**-0.5, window=window, soft_cap=soft_cap),
        num_query_heads=num_query_heads,
    )
    return step.to(dtype)


def in_the_last_columns(lengths: tuple[int, ...], counts: tuple[int, ...], head_dim: int, device: torch.device) -> Step:
    """Scores and values that live in the last eight columns of each head alone."""
    step = make_step(lengths, counts, heads=(2, 1), head_dim=head_dim, magnitude=4.0, device=device)
    pool, qkv = step.pool.clone(), step.qkv.clone()
    pool[..., :-8] *= 0.0
    qkv.view(len(qkv), -1, head_dim)[..., :-8] = 0.0
    rotation = step.new.rotation  # turned by nothing, or half of each pair would leave the last columns
    still = replace(rotation, cos=torch.ones_like(rotation.cos), sin=torch.zeros_like(rotation.sin))
    return replace(step, pool=pool, qkv=qkv, new=replace(step.new, rotation=still))


def truth(step: Step) -> tuple[Tensor, Tensor]:
    """Attended rows and the pool after the step, in float64 from the step's own (rounded) inputs."""
    return own_reference(step.to(torch.float64))


def own_reference(step: Step) -> tuple[Tensor, Tensor]:
    pool = step.pool.clone()
    attended = paged_decode.reference(
        step.qkv, step.paged(pool), step.scoring, num_query_heads=step.num_query_heads, new=step.new
    )
    return attended, pool


def torch_low_precision(step: Step) -> Tensor:
    """As HuggingFace computes it in this dtype: each product of the rotation rounded, then torch's attention; under a
    cap, which that does not know, products, cap, softmax and products one after the other.
    """
    pool = step.pool.clone()
    query = cache_write.reference(step.qkv, step.new.positions, step.new.slots, step.new.rotation, pool, LAYER)
    out = torch.zeros(len(query), step.num_query_heads * query.shape[2], dtype=query.dtype, device=query.device)
    size, repeats = pool.shape[3], step.num_query_heads // pool.shape[4]
    for request, (length, count) in enumerate(zip(step.lengths, step.counts, strict=True)):
        first = int(step.starts[request])
        blocks = step.tables[request, : -(-length // size)]
        keys, values = (
            pool[part, LAYER][blocks].flatten(0, 1)[:length].repeat_interleave(repeats, 1) for part in (0, 1)
        )
        places = torch.arange(length, device=query.device)
        asking = places[length - count :, None]
        seen = places <= asking
        if step.scoring.window is not None:
            seen &= places > asking - step.scoring.window
        rows = query[first : first + count].transpose(0, 1)
        cap = step.scoring.soft_cap
        if cap is not None:
            scores = cap * torch.tanh(rows @ keys.permute(1, 2, 0) * step.scoring.scale / cap)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
            attended = weights @ values.transpose(0, 1)
        else:
            attended = functional.scaled_dot_product_attention(
                rows[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], seen, scale=step.scoring.scale
            )[0]
        out[first : first + count] = attended.transpose(0, 1).flatten(1)
    return out


def decode(step: Step, pool: Tensor, **options: object) -> Tensor:
    """The fused kernel; writes to the pool."""
    return paged_decode.paged_decode(
        step.qkv, step.paged(pool), step.scoring, num_query_heads=step.num_query_heads, new=step.new, **options
    )


def prefill(step: Step, pool: Tensor, **options: object) -> Tensor:
    """The write, then the prefill kernel."""
    query = cache_write.rotate_and_write(
        step.qkv,
        step.new.positions,
        step.new.slots,
        step.new.rotation,
        pool,
        LAYER,
        num_query_heads=step.num_query_heads,
    )
    return paged_prefill.paged_prefill(
        query.flatten(1), step.paged(pool), step.scoring, num_query_heads=step.num_query_heads, **options
    )


def rounding_of(step: Step) -> float:
    """How far roundings on the way can move a result of attention, whatever their signs.

    Queries and keys are made in float32 and rounded once (u each, of |q||k| by Cauchy and Schwarz), their product and
    softmax are float32 sums; scores that are off by d move a softmax by e^2d - 1 at most; weights are rounded once (u).
    """
    wide = step.to(torch.float64)
    pool = wide.pool.clone()
    query = cache_write.reference(wide.qkv, wide.new.positions, wide.new.slots, wide.new.rotation, pool, LAYER)
    keys, values = pool[0, LAYER].nan_to_num(), pool[1, LAYER].nan_to_num()
    product = (query.norm(dim=-1).max() * keys.norm(dim=-1).max()).item() * step.scoring.scale
    u, head_dim, count = unit(step.qkv.dtype), query.shape[-1], max(step.lengths)
    off = product * (2.1 * u + (2 * head_dim + 16) * SINGLE) + 16 * SINGLE * (step.scoring.soft_cap or 0.0)
    return values.abs().max().item() * min(2.0, math.expm1(2 * off) + 2 * u + (count + 64) * SINGLE)


def assert_attends(found: Tensor, step: Step, exact: Tensor | None = None) -> None:
    """Every value of one step within what rounding can do (`rounding_of`) of the truth."""
    assert_within(found, truth(step)[0] if exact is None else exact, rounding_of(step))


def assert_many_by_the_rule(run: Callable[[Step], Tensor], steps: list[Step]) -> None:
    """Errors over many steps by the rule."""
    exact = [truth(step)[0].flatten() for step in steps]
    found, low = ([function(step).flatten() for step in steps] for function in (run, torch_low_precision))
    assert_by_the_rule(*(torch.cat(values) for values in (found, low, exact)))


def assert_as_accurate(found: Tensor, torchs: Tensor, exact: Tensor, *, rms: float = 3.0, most: float = 6.0) -> None:
    """Errors against float64, their root mean square and their largest, as multiples of torch's own.

    The rule is 1.05 and 2; over the few values of one small step chance moves either by more, so it is laid on many
    steps together (`test_errors_of_many_steps...`), and one step may have the defaults.
    """
    assert not found.isnan().any(), "a value that nobody wrote was read"
    ours, theirs = (found.double() - exact).abs(), (torchs.double() - exact).abs()
    means = [error.pow(2).mean().sqrt().item() for error in (ours, theirs)]
    # Below a rounding of the result there is nothing to compare; in float32 two orders of summation differ by as much.
    limits = torch.finfo(found.dtype)
    unit = limits.eps * max(exact.abs().max().item(), 16 * limits.tiny)  # below `tiny` roundings stay as they are
    floor = unit / (2 if found.dtype == torch.float32 else 8)
    assert means[0] <= max(rms * means[1], floor), f"RMS error {means[0]:.3g}, torch's {means[1]:.3g}"
    assert ours.max() <= max(most * theirs.max().item(), unit), f"largest {ours.max():.3g}, torch's {theirs.max():.3g}"


def assert_pool_equals(found: Tensor, expected: Tensor, before: Tensor) -> None:
    """Only owned slots were written (NaN elsewhere stayed), with the right numbers, and nothing old was touched."""
    assert torch.equal(found.isnan(), expected.isnan()), "a slot that nobody owns was written, or an owned one was not"
    old = ~before.isnan()
    assert torch.equal(found[old], before[old]), "an old key or value changed"
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=2 * torch.finfo(found.dtype).eps, atol=1e-2 * 2**-6, equal_nan=True
    )
