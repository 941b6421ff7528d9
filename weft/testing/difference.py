"""What a difference looks like: where it is, the text around it, how far apart in units in the last place.

Knows tokens and numbers, not who computed them nor whether they may differ.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Decode = Callable[[Sequence[int]], str]

_SAME_WIDTH = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_TOKENS_AROUND = 6
_TOKENS_OF_TEXT = 12


def units_apart(left: Float[Tensor, "*shape"], right: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """How many steps between representable values of their dtype lie between the two: units in the last place.

    >>> units_apart(torch.tensor([1.0, -0.0]), torch.tensor([1.0 + 2**-22, 0.0])).tolist()
    [2.0, 0.0]
    """
    return (_ordered(left) - _ordered(right)).abs().double()


def where_tokens_part(
    reference: Sequence[int], actual: Sequence[int], place: int, decode: Decode | None = None
) -> list[str]:
    r"""Lines that show both around `place`, tokens and, with `decode`, text.

    >>> print(*where_tokens_part([5, 6, 7], [5, 9], 1), sep="\n")
    reference  5 [6] 7
    engine     5 [9]
    """
    named = (("reference", reference), ("engine", actual))
    lines = [f"{name:<10} {_tokens(tokens, place)}" for name, tokens in named]
    if decode is not None:
        lines += [f"{name:<10} {_text(tokens, place, decode)}" for name, tokens in named]
    return lines


def where_logits_part(
    reference: Float[Tensor, "V"], actual: Float[Tensor, "V"], dtype: torch.dtype = torch.float32
) -> str:
    """The entry of one row in which the two lie furthest apart. dtype: in whose units."""
    gaps = (reference - actual).abs().nan_to_num(nan=float("inf"))
    token = int(gaps.argmax())
    units = float(units_apart(reference[token].to(dtype), actual[token].to(dtype)))
    name = str(dtype).removeprefix("torch.")
    found, expected = float(actual[token]), float(reference[token])
    return f"token {token}: {found:.9g}, the reference has {expected:.9g} ({units:,.0f} ULPs of {name})"


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of the values, one step apart where these are neighbours; both zeros are 0."""
    bits = values.contiguous().view(_SAME_WIDTH[values.dtype])
    magnitude = (bits & torch.iinfo(bits.dtype).max).long()
    return torch.where(bits < 0, -magnitude, magnitude)


def _tokens(tokens: Sequence[int], place: int) -> str:
    first, last = max(place - _TOKENS_AROUND, 0), place + _TOKENS_AROUND + 1
    words = [f"[{token}]" if index == place else str(token) for index, token in enumerate(tokens[:last])][first:]
    end = [] if place < len(tokens) else ["[ends]"]
    return " ".join([*(["..."] if first else []), *words, *end, *(["..."] if last < len(tokens) else [])])


def _text(tokens: Sequence[int], place: int, decode: Decode) -> str:
    before = decode(list(tokens[max(place - _TOKENS_OF_TEXT, 0) : place]))
    after = decode(list(tokens[place : place + _TOKENS_OF_TEXT]))
    return f"{before!r} then {after!r}"
