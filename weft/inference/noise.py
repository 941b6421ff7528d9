"""Gumbel noise of (seed, position, token id) and nothing else: Philox-4x32-10 (Salmon et al. 2011, section 3.3).

So a seeded request draws the same tokens in any batch, after any preemption, on any backend.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(
    counter: tuple[Int[Tensor, "*shape"], Int[Tensor, "*shape"], Int[Tensor, "*shape"], Int[Tensor, "*shape"]],
    key: tuple[Int[Tensor, "*shape"], Int[Tensor, "*shape"]],
) -> tuple[Int[Tensor, "*shape"], Int[Tensor, "*shape"], Int[Tensor, "*shape"], Int[Tensor, "*shape"]]:
    """Four 32-bit words for each counter and key of 32-bit words, all held in int64.

    The 64-bit product of two words wraps in int64 to the right bits; the shift's sign is masked away.
    """
    first, second, third, fourth = counter
    low, high = key
    for _ in range(_ROUNDS):
        products = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        (high_0, low_0), (high_1, low_1) = ((product >> 32 & _MASK, product & _MASK) for product in products)
        first, second, third, fourth = high_1 ^ second ^ low, low_1, high_0 ^ fourth ^ high, low_0
        low, high = low + _WEYL[0] & _MASK, high + _WEYL[1] & _MASK
    return first, second, third, fourth


def gumbel(seeds: Int[Tensor, "R"], positions: Int[Tensor, "R"], vocab_size: int) -> Float[Tensor, "R V"]:
    """Standard Gumbel noise for each row and token id, as float32.

    key = the 64-bit seed (its bits in int64), counter = (token id, position, 0, 0), x the first word,
    u = ((x >> 8) + 0.5) / 2**24, noise = -log(-log(u)). In float32 the largest u would round to 1 and its noise to
    infinity, so the logarithms are taken in float64.
    """
    tokens = torch.arange(vocab_size, device=seeds.device).expand(len(seeds), -1)
    position = positions[:, None].expand_as(tokens)
    zero = torch.zeros_like(tokens)
    key = seeds[:, None] & _MASK, seeds[:, None] >> 32 & _MASK
    word, *_ = philox((tokens, position, zero, zero), (key[0].expand_as(tokens), key[1].expand_as(tokens)))
    uniform = ((word >> 8).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform)).float()
