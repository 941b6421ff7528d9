"""The noise is Philox-4x32-10, a function of (seed, position, token id) and of nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.inference import noise
from weft.inference.noise import gumbel, philox

Words = tuple[int, ...]

# `kat_vectors` of Random123 (Salmon et al. 2011): counter, key, output.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0xA40938227FFFFFFF]

seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**31 - 1)
word = st.integers(0, 2**32 - 1)


def philox_in_python(counter: Words, key: Words) -> Words:
    for round_ in range(10):
        low, high = ((start + round_ * step) % 2**32 for start, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        even, odd = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = (odd >> 32 ^ counter[1] ^ low, odd % 2**32, even >> 32 ^ counter[3] ^ high, even % 2**32)
    return counter


def gumbel_in_python(seed: int, position: int, token: int) -> float:
    first, *_ = philox_in_python((token, position, 0, 0), (seed % 2**32, seed >> 32))
    return -math.log(-math.log(((first >> 8) + 0.5) / 2**24))


def bits(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def noise_of(rows: list[tuple[int, int]], vocab_size: int) -> Tensor:
    seed_bits = torch.tensor([bits(seed) for seed, _ in rows])
    return gumbel(seed_bits, torch.tensor([position for _, position in rows]), vocab_size)


def philox_of(counter: Words, key: Words) -> Words:
    a, b, c, d, low, high = (torch.tensor([value]) for value in (*counter, *key))
    return tuple(int(out) for out in philox((a, b, c, d), (low, high)))


@pytest.mark.parametrize("implementation", [philox_of, philox_in_python])
@pytest.mark.parametrize("vector", PUBLISHED)
def test_philox_gives_the_published_words(implementation: object, vector: tuple[str, str, str]) -> None:
    counter, key, output = (tuple(int(digits, 16) for digits in part.split()) for part in vector)
    assert callable(implementation)
    assert implementation(counter, key) == output


@given(counter=st.tuples(word, word, word, word), key=st.tuples(word, word))
def test_philox_in_int64_equals_philox_in_integers_without_bound(counter: Words, key: Words) -> None:
    assert philox_of(counter, key) == philox_in_python(counter, key)


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_documented_formula_for_every_64_bit_seed(seed: int) -> None:
    drawn = noise_of([(seed, 7)], 13)
    expected = torch.tensor([[gumbel_in_python(seed, 7, token) for token in range(13)]], dtype=torch.float64)
    assert drawn.dtype == torch.float32
    torch.testing.assert_close(drawn, expected.float(), rtol=1e-6, atol=1e-7)


def test_every_bit_of_the_seed_changes_the_noise() -> None:
    drawn = noise_of([(0, 0), *((1 << bit, 0) for bit in range(64))], 8)
    assert len({tuple(row) for row in drawn.tolist()}) == 65


@pytest.mark.parametrize("extreme", [0, 255, 256, 2**31, 2**32 - 256, 2**32 - 1])
def test_noise_is_finite_for_every_word(extreme: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.full_like(counter[0], extreme),) * 4

    monkeypatch.setattr(noise, "philox", constant)
    drawn = noise_of([(0, 0)], 3)
    assert drawn.isfinite().all()
    assert drawn.abs().max() < 17.4  # -log(-log(1 - 2**-25)); SamplingParams bounds the temperature by it


@given(rows=st.lists(st.tuples(seeds, positions), min_size=1, max_size=6), data=st.data())
def test_noise_depends_on_seed_position_and_token_whatever_the_batch_order_and_width(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    width = data.draw(st.integers(1, 40))
    alone = torch.cat([noise_of([rows[place]], 40) for place in order])
    assert torch.equal(noise_of([rows[place] for place in order], width), alone[:, :width])


def test_noise_is_made_where_the_seeds_are() -> None:
    """On a device without memory, which no tensor of the CPU can be added to."""
    seeds = torch.zeros(2, dtype=torch.int64, device="meta")
    assert gumbel(seeds, seeds, 5).device == seeds.device
