"""What goes wrong in processors, planted: each fault breaks a law that holds without it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.inference.planting import Edit, planted_in
from tests.unit.inference.processed import Asked, processed

MODULES = ("processors", "row_processing", "step_processing", "processing")
EOS = frozenset({3, 7})


@contextmanager
def planted(edits: Sequence[Edit]) -> Iterator[ModuleType]:
    """The module of `Processing` with the edits made to it and to what it imports; nobody else sees them."""
    with planted_in(MODULES, edits) as made:
        yield made["processing"]


def found(module: ModuleType, *asked: Asked, logit: float = 2.0) -> list[list[float]]:
    rows: list[list[float]] = processed(asked, torch.full((len(asked), 9), logit), module.Processing).tolist()
    return rows


def presence_counts_the_output_alone(module: ModuleType) -> None:
    (row,) = found(module, Asked([4, 4, 5], 2, {"presence_penalty": 1.0}))
    assert (row[4], row[5], row[6]) == (2.0, 1.0, 2.0)


def frequency_counts_every_time_and_presence_once(module: ModuleType) -> None:
    params = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    for _ in range(2):
        (row,) = found(module, Asked([4, 5, 5, 5], 1, params))
        assert (row[4], row[5]) == (2.0, 0.75)


def repetition_sees_the_prompt_and_keeps_the_sign(module: ModuleType) -> None:
    for logit, expected in ((2.0, 1.0), (-2.0, -4.0)):
        (row,) = found(module, Asked([4, 4, 5], 2, {"repetition_penalty": 2.0}), logit=logit)
        assert (row[4], row[5], row[6]) == (expected, expected, logit)


def a_shorter_row_is_not_penalised_for_what_others_left(module: ModuleType) -> None:
    params = {"repetition_penalty": 2.0, "presence_penalty": 1.0}
    rows = found(module, Asked([6] * 30, 1, params), Asked([7], 1, params))
    assert [place for place, value in enumerate(rows[1]) if value != 2.0] == [7]


def stop_tokens_are_held_back_for_so_many_tokens(module: ModuleType) -> None:
    for said in range(4):
        (row,) = found(module, Asked([1, 2, *[4] * said], 2, {"min_tokens": 2}, EOS))
        assert [row[token] == -inf for token in (3, 7, 4)] == [said < 2, said < 2, False]


def words_end_where_the_text_ends_in_their_beginning(module: ModuleType) -> None:
    words = [[8], [4, 5, 6], [1, 6], [3, 4, 5, 7], [2, 4, 5, 1]]
    for prompt in (1, 3):
        (row,) = found(module, Asked([2, 4, 5], prompt, {"bad_words": words}))
        assert [token for token, value in enumerate(row) if value == -inf] == [1, 6, 8]


def what_is_not_allowed_stays_out(module: ModuleType) -> None:
    (row,) = found(module, Asked([1], 1, {"allowed_token_ids": [4, 5], "logit_bias": {4: 1, 6: 100}}))
    assert (row[4], row[5], row[6]) == (3.0, 2.0, -inf)


def a_row_that_asks_for_nothing_is_left_alone(module: ModuleType) -> None:
    params: dict[str, Any] = {"logit_bias": {4: 1}, "allowed_token_ids": [4], "frequency_penalty": 1.0}
    rows = found(module, Asked([4, 4], 1), Asked([4, 4], 1, params), Asked([4, 4], 1))
    assert rows[0] == rows[2] == [2.0] * 9
    assert rows[1] == [-inf] * 4 + [2.0] + [-inf] * 4


@dataclass(frozen=True)
class Fault:
    report: str
    law: Callable[[ModuleType], None]
    edit: Edit


FAULTS = [
    Fault(
        "presence and frequency count the prompt (K06-8)",
        presence_counts_the_output_alone,
        ("step_processing", "[row.processing.prompt_length for row in rows]", "[0] * len(rows)"),
    ),
    Fault(
        "presence counts every time",
        frequency_counts_every_time_and_presence_once,
        ("processors", "presence * counts.clamp(max=1)", "presence * counts"),
    ),
    Fault(
        "repetition misses the prompt (K06-8)",
        repetition_sees_the_prompt_and_keeps_the_sign,
        ("step_processing", "self._window(rows, [0] * len(rows))", "self._window(rows, [2] * len(rows))"),
    ),
    Fault(
        "repetition makes a negative logit likelier",
        repetition_sees_the_prompt_and_keeps_the_sign,
        ("processors", "torch.where(values > 0, values / penalties, values * penalties)", "values / penalties"),
    ),
    Fault(
        "a row is looked at as far as the longest",
        a_shorter_row_is_not_penalised_for_what_others_left,
        ("step_processing", "if self.is_even and tokens.is_even:", "if self.is_even:"),
    ),
    Fault(
        "min_tokens gives one more (K06-3)",
        stop_tokens_are_held_back_for_so_many_tokens,
        ("processors", "lengths < least", "lengths <= least"),
    ),
    Fault(
        "min_tokens counts the prompt",
        stop_tokens_are_held_back_for_so_many_tokens,
        ("row_processing", "admission.num_prompt_tokens + params.min_tokens", "params.min_tokens"),
    ),
    Fault(
        "min_tokens holds back one EOS of several (K06-5)",
        stop_tokens_are_held_back_for_so_many_tokens,
        ("row_processing", "sorted(admission.stop_token_ids) if", "sorted(admission.stop_token_ids)[:1] if"),
    ),
    Fault(
        "words are compared one token off",
        words_end_where_the_text_ends_in_their_beginning,
        ("processors", "torch.arange(-beginnings.shape[1], 0,", "torch.arange(1 - beginnings.shape[1], 1,"),
    ),
    Fault(
        "a word begins before the text",
        words_end_where_the_text_ends_in_their_beginning,
        (
            "processors",
            "((before == beginnings) | (beginnings < 0)).all(dim=-1)",
            "(before == beginnings)[:, -1:].all(dim=-1)",
        ),
    ),
    Fault(
        "a bias brings back what is not allowed",
        what_is_not_allowed_stays_out,
        (
            "processors",
            "flat[places] = flat[places] + biases",
            "flat[places] = flat[places].nan_to_num(neginf=2.0) + biases",
        ),
    ),
    Fault(
        "a row gets its neighbour's edits",
        a_row_that_asks_for_nothing_is_left_alone,
        ("processing", "first = column if row_each else place", "first = 0"),
    ),
]
LAWS = sorted({fault.law.__name__: fault.law for fault in FAULTS}.items())


@pytest.mark.parametrize(("name", "law"), LAWS, ids=[name for name, _ in LAWS])
def test_the_law_holds(name: str, law: Callable[[ModuleType], None]) -> None:
    with planted(()) as module:
        law(module)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.report)
def test_the_law_fails_with_the_fault(fault: Fault) -> None:
    with planted((fault.edit,)) as module, pytest.raises(AssertionError):
        fault.law(module)
