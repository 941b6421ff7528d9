"""One token a row of logits: argmax, or argmax of `logits + temperature * Gumbel noise` of (seed, position, token id).

A logit of -inf is a token that cannot be drawn, and so is one below the row's threshold (`truncate.py`), where there is
one; a chunk in which nothing can be drawn costs no noise.

The noise is Philox-4x32-10 (Salmon et al. 2011, section 3.3), keyed by the seed, counting (token id, position, 0, 0),
and its logarithms are taken in float64; multiplication and addition are not fused. So a row draws what the same row
draws in plain torch, in any batch. Programs take chunks of the vocabulary, and a second launch compares their winners.
Logits of any floating dtype are taken as they are, and noise is added in float32.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._arguments import check_device, check_floats, debugging
from weft.kernels._jit import cdiv, early_launch, jit, next_power_of_2, tl
from weft.kernels.specialisation import Specialisation

BLOCK = 1024
_ROUNDS = 10


def reference(
    logits: Float[Tensor, "R V"],
    temperatures: Float[Tensor, "R"],
    seeds: Int[Tensor, "R"],
    positions: Int[Tensor, "R"],
    thresholds: Float[Tensor, "R"] | None = None,
) -> Int[Tensor, "R"]:
    """The same in plain torch."""
    finite = torch.isfinite(logits.amax(dim=-1))  # NaN where there is one
    if thresholds is not None:
        finite &= (logits >= thresholds[:, None]).any(dim=-1)
        logits = logits.float().masked_fill(logits < thresholds[:, None], -torch.inf)
    tokens = torch.arange(logits.shape[1], device=logits.device)[None].expand_as(logits)
    noise = -torch.log(-torch.log(uniform_reference(tokens, positions[:, None], seeds[:, None]))).float()
    noisy = torch.where((temperatures > 0)[:, None], logits + temperatures[:, None] * noise, logits)
    return torch.where(finite, noisy.argmax(dim=-1), -1)


def uniform_reference(
    tokens: Int[Tensor, "R V"], positions: Int[Tensor, "R 1"], seeds: Int[Tensor, "R 1"]
) -> Float[Tensor, "R V"]:
    """Numbers in (0, 1), in float64: 24 bits of the first word and a half."""
    mask = 0xFFFFFFFF
    first, second = tokens, positions.expand_as(tokens)
    third = fourth = torch.zeros_like(tokens)
    low, high = seeds & mask, seeds >> 32 & mask
    for _ in range(_ROUNDS):
        left, right = first * 0xD2511F53, third * 0xCD9E8D57
        first, second = (right >> 32 & mask) ^ second ^ low, right & mask
        third, fourth = (left >> 32 & mask) ^ fourth ^ high, left & mask
        low, high = low + 0x9E3779B9 & mask, high + 0xBB67AE85 & mask
    return ((first >> 8).double() + 0.5) * 2.0**-24


@jit
def _gumbel(token, position, seed, ROUNDS: tl.constexpr):
    """Standard Gumbel noise in float32 of tokens, a position and the 64 bits of a seed; 32-bit words in uint64."""
    first = token.to(tl.uint64)
    zero = first ^ first
    second = zero + position.to(tl.uint64)
    third, fourth = zero, zero
    key = zero + seed.to(tl.uint64)
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in tl.static_range(ROUNDS):
        left, right = first * 0xD2511F53, third * 0xCD9E8D57
        first, second = (right >> 32) ^ second ^ low, right & 0xFFFFFFFF
        third, fourth = (left >> 32) ^ fourth ^ high, left & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    uniform = ((first >> 8).to(tl.float64) + 0.5) * 5.9604644775390625e-08
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@jit(do_not_specialize_on_alignment=["temperatures", "seeds", "positions", "thresholds"])
def _best_kernel(
    logits,
    stride,
    temperatures,
    seeds,
    positions,
    thresholds,
    best,
    winners,
    vocab_size,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    values = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
    broken = tl.max(tl.where(values < float("inf"), 0, 1), 0)
    temperature = tl.load(temperatures + row)
    drawn = temperature > 0
    if CUT:
        inside = inside & (values >= tl.load(thresholds + row))
        drawn = drawn & (tl.max(inside.to(tl.int32), 0) > 0)
    if drawn:
        noise = _gumbel(token.to(tl.int64), tl.load(positions + row), tl.load(seeds + row), ROUNDS)
        values = values + temperature * noise
    values = tl.where(inside & (values == values), values, float("-inf"))
    place = row * tl.num_programs(1) + chunk
    winner = chunk * BLOCK + tl.argmax(values, 0)
    highest = tl.max(values, 0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(best + place, highest)
    tl.store(winners + place, tl.where(broken != 0, -1, winner))


@jit
def _last_kernel(best, winners, tokens, chunks, CHUNKS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    values = tl.load(best + row * chunks + chunk, mask=there, other=float("-inf"))
    winner = tl.load(winners + row * chunks + chunk, mask=there, other=0)
    broken = (tl.min(winner, 0) < 0) | (tl.max(values, 0) == float("-inf"))
    found = tl.sum(tl.where(chunk == tl.argmax(values, 0), winner, 0), 0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(tokens + row, tl.where(broken, -1, found).to(tl.int64))


def sample(
    logits: Float[Tensor, "R V"],
    temperatures: Float[Tensor, "R"],
    seeds: Int[Tensor, "R"],
    positions: Int[Tensor, "R"],
    thresholds: Float[Tensor, "R"] | None = None,
) -> Int[Tensor, "R"]:
    """A token id for each row, the lowest of equals; -1 for a row with NaN or infinity, or with nothing to draw.

    temperatures: 0 is greedy.   seeds: the 64 bits of each, in int64.   positions: of the token being sampled.
    thresholds: the lowest logit of each row that may be drawn, in float32; None for no such limit.
    Raises: KernelError for shapes and dtypes that do not fit; with WEFT_DEBUG=1 also for temperatures that are none.
    """
    if logits.ndim != 2 or logits.stride(1) != 1 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise KernelError(
            f"logits must be [R, V] floats with dense rows, got {logits.dtype} of shape {tuple(logits.shape)}"
        )
    count, vocab_size = logits.shape
    for name, tensor, dtype in (
        ("temperatures", temperatures, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
        ("thresholds", temperatures if thresholds is None else thresholds, torch.float32),
    ):
        if tensor.shape != (count,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise KernelError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not a contiguous {dtype} [{count}]")
    columns = {"temperatures": temperatures, "seeds": seeds, "positions": positions, "thresholds": thresholds}
    check_device("logits", logits, others=columns)
    check_floats("logits", logits)
    if debugging():
        broken = (~((temperatures >= 0) & temperatures.isfinite())).nonzero()
        if len(broken):
            place = int(broken[0, 0])
            raise KernelError(f"temperatures[{place}]={float(temperatures[place])} is no number from 0 on")
    chunks = cdiv(vocab_size, BLOCK)
    best = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    winners = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        early = early_launch(logits.device)
        _best_kernel[(count, chunks)](
            logits,
            logits.stride(0),
            temperatures,
            seeds,
            positions,
            temperatures if thresholds is None else thresholds,
            best,
            winners,
            vocab_size,
            ROUNDS=_ROUNDS,
            BLOCK=BLOCK,
            CUT=thresholds is not None,
            num_warps=4,
            enable_fp_fusion=False,
            **early,
        )
        _last_kernel[(count,)](best, winners, tokens, chunks, CHUNKS=next_power_of_2(chunks), num_warps=1, **early)
    return tokens


def _specialisations(dtype: str, *, early: bool, cut: bool = False) -> tuple[Specialisation, Specialisation]:
    name, capabilities = ("-early", (90, 100)) if early else ("", (80, 89))
    best = Specialisation(
        name=f"best-{dtype}{'-cut' if cut else ''}{name}",
        kernel=_best_kernel,
        signature={
            "logits": f"*{dtype}",
            "stride": "i32",
            "temperatures": "*fp32",
            "seeds": "*i64",
            "positions": "*i64",
            "thresholds": "*fp32",
            "best": "*fp32",
            "winners": "*i32",
            "vocab_size": "i32",
        },
        constants={"ROUNDS": _ROUNDS, "BLOCK": BLOCK, "CUT": cut, "EARLY": early},
        num_warps=4,
        num_stages=3,
        aligned=frozenset({"logits", "stride", "best", "winners", "vocab_size"}),
        capabilities=capabilities,
        waits=early,
        options={"enable_fp_fusion": False},
    )
    last = Specialisation(
        name=f"last{name}",
        kernel=_last_kernel,
        signature={"best": "*fp32", "winners": "*i32", "tokens": "*i64", "chunks": "i32"},
        constants={"CHUNKS": 128, "EARLY": early},
        num_warps=1,
        num_stages=3,
        aligned=frozenset({"best", "winners", "tokens"}),
        capabilities=capabilities,
        waits=early,
    )
    return best, last


SPECIALISATIONS = (
    *_specialisations("fp32", early=True),
    _specialisations("bf16", early=True)[0],
    _specialisations("fp16", early=True)[0],
    _specialisations("bf16", early=True, cut=True)[0],
    _specialisations("fp32", early=True, cut=True)[0],
    *_specialisations("fp32", early=False),
    _specialisations("bf16", early=False, cut=True)[0],
)
