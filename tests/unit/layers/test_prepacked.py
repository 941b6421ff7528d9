"""A prepacked layer is its plain layer's product, whatever the shape, and takes its place in a whole model."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from weft.layers import prepacked
from weft.layers.linear import Embedding, Linear, Projection
from weft.layers.prepacked import PrepackedLinear, prepack, reason_against_prepacking

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (13, 37), (96, 131), (576, 960)]  # (in, out); all but the last are odd to every vector width
ROWS = [0, 1, 2, 7, 16, 33]

runs = {dtype: reason_against_prepacking(CPU, dtype) for dtype in DTYPES}
pytestmark = pytest.mark.skipif(runs[torch.float32] is not None, reason=str(runs[torch.float32]))


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if runs[request.param] is not None:
        pytest.skip(str(runs[request.param]))
    chosen: torch.dtype = request.param
    return chosen


def random_linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool) -> Linear:
    linear = Linear(inputs, (outputs,), bias=bias, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(inputs)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_(generator=generator)
    return linear


def random_rows(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)


def is_product(actual: Tensor, x: Tensor, linear: Linear) -> bool:
    """Within the rounding of any order of the sum, and one more rounding of the result.

    A sum of n products in any order is off by at most n * u * sum |x w| (Higham 2002, section 3.1), u of float32,
    which oneDNN accumulates in; the result rounds to its own dtype.
    """
    weight, bias = linear.weight.double(), torch.zeros(()) if linear.bias is None else linear.bias.double()
    exact = x.double() @ weight.T + bias
    magnitude = x.double().abs() @ weight.abs().T + bias.abs()
    terms = x.shape[1] + 1
    bound = terms * torch.finfo(torch.float32).eps * magnitude + torch.finfo(x.dtype).eps * exact.abs()
    return actual.dtype == x.dtype and actual.shape == exact.shape and bool(((actual - exact).abs() <= bound).all())


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@torch.inference_mode()
def test_the_product_is_the_plain_layers(inputs: int, outputs: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    linear, x = random_linear(inputs, outputs, dtype, bias=bias), random_rows(rows, inputs, dtype)
    assert is_product(PrepackedLinear(linear)(x), x, linear)
    assert is_product(linear(x), x, linear)  # the bound holds for the reference too


@torch.inference_mode()
def test_one_packing_serves_any_number_of_rows_and_leaves_its_input_alone(dtype: torch.dtype) -> None:
    linear = random_linear(96, 131, dtype, bias=True)
    packed = PrepackedLinear(linear)
    for rows in (7, 0, 1, 512, 7):
        x = random_rows(rows, 96, dtype)
        before = x.clone()
        assert is_product(packed(x), x, linear)
        assert torch.equal(x, before)


@pytest.mark.parametrize("view", ["transposed", "part of wider rows", "every other row", "one row repeated"])
@torch.inference_mode()
def test_rows_may_lie_anyhow_in_memory(view: str, dtype: torch.dtype) -> None:
    linear = random_linear(96, 131, dtype, bias=True)
    x = {
        "transposed": random_rows(96, 7, dtype).T,
        "part of wider rows": random_rows(7, 200, dtype)[:, 3:99],
        "every other row": random_rows(14, 96, dtype)[::2],
        "one row repeated": random_rows(1, 96, dtype).expand(7, 96),
    }[view]
    assert not x.is_contiguous()
    assert is_product(PrepackedLinear(linear)(x), x, linear)


@pytest.mark.parametrize("fault", ["bias dropped", "weight of another layer", "one column zero", "rows exchanged"])
@torch.inference_mode()
def test_a_wrong_product_is_seen(fault: str, dtype: torch.dtype) -> None:
    linear, x = random_linear(96, 131, dtype, bias=True), random_rows(7, 96, dtype)
    wrong = random_linear(96, 131, dtype, bias=True)
    assert wrong.bias is not None
    if fault == "bias dropped":
        wrong.bias = None
    elif fault == "weight of another layer":
        wrong.weight.copy_(wrong.weight.flip(0))
    elif fault == "one column zero":
        wrong.weight[:, -1] = 0
    product = PrepackedLinear(wrong)(x)
    assert not is_product(product.flip(0) if fault == "rows exchanged" else product, x, linear)


class Model(nn.Module):
    """A list of layers, a nested one, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(11, 8, dtype=torch.float32, device=CPU)
        self.layers = nn.ModuleList(random_linear(8, 8, torch.float32, bias=True) for _ in range(2))
        self.inner = nn.Sequential(nn.Sequential(random_linear(8, 5, torch.float32, bias=False)))
        self.head = Linear(8, (11,), dtype=torch.float32, device=CPU)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight)


def test_prepack_replaces_every_linear_and_nothing_else() -> None:
    model = Model()
    before = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    x = random_rows(3, 8, torch.float32)
    expected = {name: linear(x) for name, linear in before.items()}
    prepack(model)
    after = {name: module for name, module in model.named_modules() if isinstance(module, PrepackedLinear)}
    assert after.keys() == before.keys()
    assert not [module for module in model.modules() if isinstance(module, Linear)]
    for name, product in expected.items():
        assert isinstance(after[name], Projection)
        torch.testing.assert_close(after[name](x), product)


def test_prepack_frees_each_matrix_but_an_embedding_that_is_tied_to_it() -> None:
    model = Model()
    layer, embedding = weakref.ref(model.layers[0].weight), model.embedding.weight
    held = embedding.clone()
    prepack(model)
    assert layer() is None
    assert list(model.parameters()) == [embedding]
    assert torch.equal(embedding, held)


def test_packing_copies_so_that_later_writes_to_the_matrix_change_nothing() -> None:
    linear, x = random_linear(8, 5, torch.float32, bias=False), random_rows(3, 8, torch.float32)
    packed = PrepackedLinear(linear)
    before = packed(x)
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(packed(x), before)


def test_where_packing_cannot_be_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_against_prepacking(CPU, torch.float32) is None
    assert "the model is on cuda:0" in str(reason_against_prepacking(torch.device("cuda:0"), torch.float32))
    assert "not float16" in str(reason_against_prepacking(CPU, torch.float16))
    monkeypatch.setattr(prepacked._onednn, "_is_mkldnn_bf16_supported", lambda: False)
    assert "no bfloat16 on this CPU" in str(reason_against_prepacking(CPU, torch.bfloat16))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "no oneDNN" in str(reason_against_prepacking(CPU, torch.float32))
