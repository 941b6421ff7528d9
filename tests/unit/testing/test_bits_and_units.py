import math

import pytest
import torch

from weft.testing import assert_bitwise
from weft.testing.difference import units_apart, where_logits_part, where_tokens_part

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_are_equal_in_any_layout(dtype: torch.dtype) -> None:
    values = torch.randn(6, 4).to(dtype)
    assert_bitwise([values, values.T], [values.clone(), values.T.contiguous()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_unit_in_the_last_place_is_a_difference_and_says_where(dtype: torch.dtype) -> None:
    values = torch.full((2, 3), 1.5, dtype=dtype)
    other = values.clone()
    other[1, 2] += torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match=r"row: 1 of 6 values differ.*first at \[1, 2\].*\(1 ULPs\)"):
        assert_bitwise([values], [other], names=["row"])


def test_the_two_zeros_have_different_bits() -> None:
    with pytest.raises(AssertionError, match="1 of 1 values differ"):
        assert_bitwise([torch.tensor([0.0])], [torch.tensor([-0.0])])


def test_a_nan_equals_nothing_not_even_itself() -> None:
    values = torch.tensor([1.0, math.nan])
    with pytest.raises(AssertionError, match=r"first at \[1\]: nan, expected nan"):
        assert_bitwise([values], [values])


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.float16)])
def test_another_shape_or_dtype_is_a_difference(other: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match=r"expected torch\.float32"):
        assert_bitwise([torch.ones(2)], [other])


def test_a_missing_tensor_is_a_difference() -> None:
    with pytest.raises(AssertionError, match="1 tensors, expected 2"):
        assert_bitwise([torch.ones(2)] * 2, [torch.ones(2)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_units_count_representable_values_across_powers_of_two_and_zero(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    ladder = torch.tensor([2 - info.eps, 2.0, -info.smallest_normal, info.smallest_normal], dtype=dtype)
    apart = units_apart(ladder[0::2], ladder[1::2]).tolist()
    assert apart == [1, 2 * round(info.smallest_normal / (info.smallest_normal * info.eps))]


def test_the_furthest_logit_of_a_row_is_named() -> None:
    words = where_logits_part(torch.tensor([1.0, 16.0, 2.0]), torch.tensor([1.0, 16.25, 2.0]), torch.bfloat16)
    assert words == "token 1: 16.25, the reference has 16 (2 ULPs of bfloat16)"
    assert where_logits_part(torch.tensor([1.0, 2.0]), torch.tensor([9.0, math.nan])).startswith("token 1: nan,")


def test_tokens_and_text_are_shown_around_the_place() -> None:
    reference = list(range(40))
    actual = [*reference[:20], 99]
    lines = where_tokens_part(reference, actual, 20, lambda ids: "".join(chr(65 + token % 26) for token in ids))
    assert lines[0] == "reference  ... 14 15 16 17 18 19 [20] 21 22 23 24 25 26 ..."
    assert lines[1] == "engine     ... 14 15 16 17 18 19 [99]"
    assert lines[2] == "reference  'IJKLMNOPQRST' then 'UVWXYZABCDEF'"
    assert lines[3] == "engine     'IJKLMNOPQRST' then 'V'"


def test_an_answer_that_ends_is_shown_to_end() -> None:
    assert where_tokens_part([1, 2, 3], [1, 2], 2)[1] == "engine     1 2 [ends]"
