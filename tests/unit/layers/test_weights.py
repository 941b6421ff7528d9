"""Every parameter is filled exactly once from exactly one tensor, or the error names the tensor."""

import pytest
import torch
from torch import Tensor, nn

from weft.errors import TensorError, UnsupportedCheckpointError
from weft.layers.linear import Embedding, Linear
from weft.layers.norm import RMSNorm
from weft.layers.weights import WEIGHT_DTYPES, WeightSlots, poison

CPU = torch.device("cpu")
SHAPES = {
    "embed.weight": (10, 4),
    "norm.weight": (4,),
    "q.weight": (6, 4),
    "q.bias": (6,),
    "k.weight": (2, 4),
    "k.bias": (2,),
    "v.weight": (2, 4),
    "v.bias": (2,),
}


class Tiny(nn.Module):
    """One parameter of each kind, with a head tied to the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = Embedding(10, 4, dtype=dtype, device=CPU)
        self.norm = RMSNorm(4, 1e-5, dtype=dtype, device=CPU)
        self.qkv = Linear(4, (6, 2, 2), bias=True, dtype=dtype, device=CPU)

    def slots(self) -> WeightSlots:
        slots = WeightSlots()
        slots.add(self.embedding, "embed")
        slots.add(self.norm, "norm")
        slots.add(self.qkv, "q", "k", "v")
        slots.add_copy("head.weight", of="embed.weight")
        return slots


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def fill(tensors: dict[str, Tensor]) -> Tiny:
    tiny = Tiny()
    tiny.slots().fill(tensors.items())
    return tiny


def test_packed_parts_land_in_their_rows_in_order(tensors: dict[str, Tensor]) -> None:
    tiny = fill(tensors)
    assert torch.equal(tiny.qkv.weight, torch.cat([tensors[f"{part}.weight"] for part in "qkv"]))
    assert torch.equal(tiny.qkv.bias, torch.cat([tensors[f"{part}.bias"] for part in "qkv"]))
    assert torch.equal(tiny.embedding.weight, tensors["embed.weight"])
    assert torch.equal(tiny.norm.weight, tensors["norm.weight"])


def test_the_order_of_tensors_never_matters(tensors: dict[str, Tensor]) -> None:
    forwards, backwards = fill(tensors), fill(dict(reversed(tensors.items())))
    assert all(
        torch.equal(one, other) for one, other in zip(forwards.parameters(), backwards.parameters(), strict=True)
    )


def test_slots_are_named_by_the_tensors_they_take() -> None:
    assert set(Tiny().slots()) == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_named(name: str, tensors: dict[str, Tensor]) -> None:
    del tensors[name]
    with pytest.raises(TensorError, match=f"lacks '{name}'$"):
        fill(tensors)


def test_many_missing_tensors_are_counted(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(TensorError, match=r"lacks 'norm.weight', 'q.weight', 'k.weight' and 4 more$"):
        fill({"embed.weight": tensors["embed.weight"]})


def test_an_unexpected_tensor_is_named_with_its_shape(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(TensorError, match=r"'o.bias' \(3x2\) is in the checkpoint but no parameter takes it"):
        fill(tensors | {"o.bias": torch.zeros(3, 2)})


def test_a_tensor_given_twice_is_named(tensors: dict[str, Tensor]) -> None:
    twice = [*tensors.items(), ("k.weight", tensors["k.weight"])]
    with pytest.raises(TensorError, match=r"'k.weight' is given twice"):
        Tiny().slots().fill(twice)


@pytest.mark.parametrize(
    ("name", "shape"), [("k.weight", (4, 2)), ("norm.weight", (1,)), ("q.bias", ()), ("v.bias", (3,))]
)
def test_a_tensor_of_another_shape_is_never_broadcast(
    name: str, shape: tuple[int, ...], tensors: dict[str, Tensor]
) -> None:
    given, wanted = ("x".join(map(str, size)) or "scalar" for size in (shape, SHAPES[name]))
    with pytest.raises(TensorError, match=f"'{name}' is {given} but the parameter is {wanted}"):
        fill(tensors | {name: torch.zeros(shape)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn], ids=str)
def test_a_quantised_tensor_is_refused_with_its_type(dtype: torch.dtype, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=f"'q.weight' holds {dtype}"):
        fill(tensors | {"q.weight": tensors["q.weight"].to(dtype)})


@pytest.mark.parametrize("stored", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_is_cast_to_the_models_dtype(
    dtype: torch.dtype, stored: torch.dtype, tensors: dict[str, Tensor]
) -> None:
    tiny, given = Tiny(dtype), {name: tensor.to(stored) for name, tensor in tensors.items()}
    tiny.slots().fill(given.items())
    assert torch.equal(tiny.embedding.weight, given["embed.weight"].to(dtype))


def test_a_tied_copy_may_be_absent_or_equal_wherever_it_comes(tensors: dict[str, Tensor]) -> None:
    copy = {"head.weight": tensors["embed.weight"].clone()}
    for given in (tensors, tensors | copy, copy | tensors):
        assert torch.equal(fill(given).embedding.weight, tensors["embed.weight"])


@pytest.mark.parametrize(
    "wrong", [torch.ones(10, 4), torch.ones(10, 5), torch.ones(4)], ids=["values", "shape", "rank"]
)
def test_a_tied_copy_that_differs_is_refused(wrong: Tensor, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(TensorError, match=r"'head.weight' differs from 'embed.weight'.*\n.*tie_word_embeddings"):
        fill(tensors | {"head.weight": wrong})


def test_a_tied_copy_is_no_substitute_for_its_original(tensors: dict[str, Tensor]) -> None:
    tensors["head.weight"] = tensors.pop("embed.weight")
    with pytest.raises(TensorError, match=r"lacks 'embed.weight'"):
        fill(tensors)


def test_ignored_suffixes_are_passed_over(tensors: dict[str, Tensor]) -> None:
    given = tensors | {"layers.0.rotary_emb.inv_freq": torch.zeros(2)}
    Tiny().slots().fill(given.items(), ignored=("rotary_emb.inv_freq",))
    with pytest.raises(TensorError, match="inv_freq"):
        Tiny().slots().fill(given.items())


def test_poison_reaches_every_parameter() -> None:
    tiny = Tiny()
    for parameter in tiny.parameters():
        nn.init.zeros_(parameter)
    poison(tiny)
    assert all(parameter.isnan().all() for parameter in tiny.parameters())
