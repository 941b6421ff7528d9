"""Scores of rows of logits: equal to float64, ranks and ties as documented, of a row alone, never all rows at once."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.inference.planting import planted_in
from weft.inference import logprobs as real
from weft.inference.plan import Admission, PromptRows, StepPlan
from weft.inference.sampling_params import SamplingParams
from weft.inference.token_logprobs import TokenLogprobs

V = 131
# A float32 logprob is a difference of two numbers up to 2**5 here, each within half an ulp, and of a sum of V
# exponentials, whose relative error is V ulps at most, though some tens at worst here.
TOLERANCE = 2**5 * 2**-23 + 32 * 2**-23


def made(rows: int, size: int = V, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) * 4).to(dtype)


def read(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int], module: Any = real) -> list[TokenLogprobs]:
    rows = torch.arange(len(logits))
    return module.launch(lambda some: logits[some], rows, torch.tensor(token_ids), num_top)()


def by_hand(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """In float64, sorted in Python."""
    logprobs = torch.log_softmax(logits.double(), dim=-1).tolist()
    values = logits.tolist()
    order = sorted(range(len(values)), key=lambda place: (-values[place], place))
    top = order if num_top < 0 else order[:num_top]
    rank = 1 + sum(value > values[token] for value in values)
    return TokenLogprobs(token, logprobs[token], rank, tuple((place, logprobs[place]) for place in top))


def assert_same(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        values = [logprob for _, logprob in one.top], [logprob for _, logprob in other.top]
        assert values[0] == pytest.approx(values[1], rel=0, abs=TOLERANCE)
        assert one.logprob == pytest.approx(other.logprob, rel=0, abs=TOLERANCE)


def scores_are_those_of_float64(module: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for num_top in (0, 1, 5, 20, -1):
            logits = made(9, dtype=dtype)
            token_ids = [int(logits[0].argmax()), int(logits[1].argmin()), *range(7)]
            expected = [by_hand(row, token, num_top) for row, token in zip(logits, token_ids, strict=True)]
            assert_same(read(logits, token_ids, [num_top] * 9, module), expected)


def equal_logits_are_no_better_and_the_smaller_id_comes_first(module: Any) -> None:
    row = [1.0, 3.0, 0.0, 3.0, -0.0, 3.0, -2.0, 0.0]
    logits = torch.tensor([row] * len(row))
    found = read(logits, range(len(row)), [-1] * len(row), module)
    assert [one.rank for one in found] == [4, 1, 5, 1, 5, 1, 8, 5]
    assert [token for token, _ in found[0].top] == [1, 3, 5, 0, 2, 4, 7, 6]
    for num_top in range(len(row)):
        (one, *_) = read(logits, range(len(row)), [num_top] * len(row), module)
        assert one.top == found[0].top[:num_top]
    for dtype in (torch.float32, torch.bfloat16):
        logits = -made(20, 40, dtype=dtype).div(4).round()  # zeros of either sign, equals of every number
        for num_top in range(41):
            expected = [by_hand(row, token, num_top) for token, row in enumerate(logits)]
            assert_same(read(logits, range(20), [num_top] * 20, module), expected)


def what_is_ruled_out_has_no_probability(module: Any) -> None:
    logits = torch.full((1, 6), -torch.inf)
    logits[0, [2, 4]] = torch.tensor([1.0, 1.0])
    ((token, logprob, rank, top),) = read(logits, [4], [3], module)
    half = pytest.approx(-0.6931472, abs=1e-6)
    assert (token, logprob, rank) == (4, half, 1)
    assert top == ((2, half), (4, half), (0, -torch.inf))


def each_row_gets_as_many_as_it_wants(module: Any) -> None:
    num_top = [0, 5, -1, -1, 3, 20, 0, -1, 200]
    found = read(made(9), range(9), num_top, module)
    assert [len(one.top) for one in found] == [0, 5, V, V, 3, 20, 0, V, V]
    alone = [read(made(9)[place : place + 1], [place], [num_top[place]], module)[0] for place in range(9)]
    assert found == alone, "bit for bit"


def a_row_does_not_depend_on_its_neighbours(module: Any) -> None:
    """Long rows, and more than one thread: sums of a single row may be cut among threads, those of several are not."""
    logits, before = made(24, 100_000), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = read(logits, range(24), [5] * 24, module)
        alone = [read(logits[place : place + 1], [place], [5], module)[0] for place in range(24)]
    finally:
        torch.set_num_threads(before)
    assert together == alone


def what_is_drawn_from_is_what_the_temperature_makes_of_it(module: Any) -> None:
    logits = made(6)
    logits[:, 3] = -torch.inf
    temperatures = torch.tensor([0.0, 0.5, 2.0, 2e-38, 1e37, 1.0])
    cuts = torch.full((6,), -torch.inf)
    for place in (0, 1, 4, 5):
        cuts[place] = logits[place].sort(descending=True).values[7]  # the eighth is kept
    for given in (None, cuts):
        drawn = torch.log_softmax(module.as_drawn(logits, temperatures, given), dim=-1)
        for place, temperature in enumerate(temperatures.tolist()):
            row = logits[place].double()
            if given is not None and temperature > 0:
                row = row.masked_fill(row < given[place], -torch.inf)
            expected = torch.log_softmax(row / (temperature or 1.0), dim=-1)
            # Over a tiny temperature float32 holds no such number, and none is as good.
            expected = expected.masked_fill(expected < -3e38, -torch.inf)
            torch.testing.assert_close(drawn[place].double(), expected, rtol=2**-20, atol=TOLERANCE)
        kept = drawn[5].isfinite().sum()
        assert kept == (V - 1 if given is None else 8)


def rows_come_in_pieces(module: Any) -> None:
    rows = 300
    logits, token_ids = made(rows), [row % V for row in range(rows)]
    whole = [by_hand(row, token, 2) for row, token in zip(logits, token_ids, strict=True)]
    with Largest() as largest:
        found = module.launch(
            lambda some: logits[some], torch.arange(rows), torch.tensor(token_ids), [2] * 200 + [-1] * 50 + [2] * 50
        )()
    assert largest.num_elements <= module.ROWS_AT_ONCE * V
    cut = [one._replace(top=one.top[:2]) for one in found]
    assert_same(cut, whole)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that anything returns."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def each_request_is_told_of_its_own_rows(module: Any) -> None:
    """A chunk without logits lies between; of the requests with logits one wants none."""
    rows = module.LogprobRows(torch.device("cpu"))
    asked = {4: None, 0: 1, 2: 2, 3: 0}
    admissions = tuple(
        Admission(row, (5, 6), 0, SamplingParams(logprobs=count), 0, num_prompt_tokens=2)
        for row, count in asked.items()
    )
    prompt_rows = (PromptRows(2, 1, (7, 8), 1), PromptRows(0, 0, (9,), 0))
    plan = StepPlan(
        request_ids=("a", "b", "c", "d"),
        rows=(0, 2, 3, 4),
        num_new_tokens=(2, 3, 4, 1),
        num_logit_rows=(1, 0, 1, 1),
        admissions=admissions,
        prompt_rows=prompt_rows,
    )
    rows.apply(plan)
    assert rows.wants(plan)
    for row_each, places in ((False, {0: 0, 2: 1}), (True, {0: 0, 2: 2})):
        logits, prompts = made(6), made(10, seed=1)
        sampled = torch.arange(20, 26)
        found = rows.launch(
            plan,
            sampled,
            logits_of=lambda some, logits=logits: logits[some],
            prompt_logits_of=lambda some, prompts=prompts: prompts[some],
            row_each=row_each,
        )()
        assert found.sampled.keys() == places.keys()
        for column, place in places.items():
            assert_same(found.sampled[column], [by_hand(logits[place], 20 + place, asked[plan.rows[column]])])
        assert_same(found.prompt[0], [by_hand(prompts[6], 7, 1), by_hand(prompts[7], 8, 1)])
        assert_same(found.prompt[1], [by_hand(prompts[0], 9, 0)])


def nothing_is_launched_for_whoever_wants_nothing(module: Any) -> None:
    rows = module.LogprobRows(torch.device("cpu"))
    options: Any = {"request_ids": ("a",), "rows": (1,), "num_new_tokens": (2,)}
    took = tuple(Admission(1, (5, 6), 0, SamplingParams(logprobs=count), 0, num_prompt_tokens=2) for count in (1, None))
    for admissions, num_logit_rows, wanted in (
        ((), 1, False),
        (took[:1], 0, False),  # a chunk that stops short
        ((), 1, True),
        (took[1:], 1, False),  # somebody else has the row
    ):
        plan = StepPlan(num_logit_rows=(num_logit_rows,), admissions=admissions, **options)
        rows.apply(plan)
        assert rows.wants(plan) is wanted
    assert rows.wants(StepPlan(num_logit_rows=(0,), prompt_rows=(PromptRows(0, 0, (3,), 1),), **options))


LAWS = [
    each_request_is_told_of_its_own_rows,
    nothing_is_launched_for_whoever_wants_nothing,
    scores_are_those_of_float64,
    equal_logits_are_no_better_and_the_smaller_id_comes_first,
    what_is_ruled_out_has_no_probability,
    each_row_gets_as_many_as_it_wants,
    a_row_does_not_depend_on_its_neighbours,
    what_is_drawn_from_is_what_the_temperature_makes_of_it,
    rows_come_in_pieces,
]

FAULTS = [
    (
        "there is a row for each request, and only those with logits are counted",
        each_request_is_told_of_its_own_rows,
        "first = column if row_each else end - count",
        "first = end - count",
    ),
    (
        "there is a row for each with logits, and all requests are counted",
        each_request_is_told_of_its_own_rows,
        "first = column if row_each else end - count",
        "first = column",
    ),
    (
        "prompts begin where the step does",
        each_request_is_told_of_its_own_rows,
        "starts[part.column] + part.first",
        "part.first",
    ),
    (
        "a chunk that stops short is scored",
        nothing_is_launched_for_whoever_wants_nothing,
        "any(count and row in self._num_top",
        "any(row in self._num_top",
    ),
    (
        "who had the row before still counts",
        nothing_is_launched_for_whoever_wants_nothing,
        "self._num_top.pop(admission.row, None)",
        "pass",
    ),
    ("ranks begin at 0", scores_are_those_of_float64, "dtype=torch.int32) + 1", "dtype=torch.int32)"),
    (
        "a rank counts equals",
        equal_logits_are_no_better_and_the_smaller_id_comes_first,
        "better = logits > logits.gather(1, token_ids)",
        "better = logits >= logits.gather(1, token_ids)",
    ),
    (
        "a rank counts as many as are equally good",
        equal_logits_are_no_better_and_the_smaller_id_comes_first,
        "ranks=better.sum(dim=-1, dtype=torch.int32) + 1",
        "ranks=(logits >= logits.gather(1, token_ids)).sum(dim=-1)",
    ),
    (
        "the order of equals is topk's own",
        equal_logits_are_no_better_and_the_smaller_id_comes_first,
        "best = logits.topk(count, dim=-1)",
        "best = logits.topk(count, dim=-1)\n    return best.indices",
    ),
    (
        "of equal ones the largest ids are found",
        equal_logits_are_no_better_and_the_smaller_id_comes_first,
        "torch.where(logits == least, countdown, 0)",
        "torch.where(logits == least, countdown.flip(0), 0)",
    ),
    (
        "the last of equal ones is there twice",
        equal_logits_are_no_better_and_the_smaller_id_comes_first,
        "torch.cat([best.values > least,",
        "torch.cat([best.values >= least,",
    ),
    (
        "minus zero is less than zero",
        equal_logits_are_no_better_and_the_smaller_id_comes_first,
        "bits = (values.float() + 0.0)",
        "bits = values.float()",
    ),
    (
        "negative numbers stand in reverse",
        equal_logits_are_no_better_and_the_smaller_id_comes_first,
        "torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()",
        "bits.long()",
    ),
    (
        "the logprob is read at its place in the order",
        scores_are_those_of_float64,
        "logprobs=logprobs.gather(1, token_ids)[:, 0]",
        "logprobs=logprobs.sort(descending=True).values.gather(1, token_ids)[:, 0]",
    ),
    (
        "logprobs are rounded as the logits are",
        scores_are_those_of_float64,
        "torch.log_softmax(logits, dim=-1, dtype=torch.float32)",
        "torch.log_softmax(logits, dim=-1).float()",
    ),
    (
        "who wants few gets as many as its neighbour",
        each_row_gets_as_many_as_it_wants,
        "[: count if count >= 0 else None]",
        "",
    ),
    (
        "a piece's border is taken twice",
        each_row_gets_as_many_as_it_wants,
        "stop = end + len(list(group))",
        "stop = end + len(list(group)) - (end > 0)",
    ),
    (
        "a row's sum is cut among threads",
        a_row_does_not_depend_on_its_neighbours,
        "logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)",
        "logprobs = logits.float() - logits.float().exp().sum(dim=-1, keepdim=True).log()",
    ),
    (
        "greedy rows are cut",
        what_is_drawn_from_is_what_the_temperature_makes_of_it,
        "noisy[:, None] & (logits < cuts[:, None])",
        "logits < cuts[:, None]",
    ),
    (
        "the last that is kept is cut",
        what_is_drawn_from_is_what_the_temperature_makes_of_it,
        "(logits < cuts[:, None])",
        "(logits <= cuts[:, None])",
    ),
    (
        "a tiny temperature overflows",
        what_is_drawn_from_is_what_the_temperature_makes_of_it,
        "below = logits - logits.amax(dim=-1, keepdim=True)",
        "below = logits",
    ),
    (
        "at temperature 0 nothing has a probability",
        what_is_drawn_from_is_what_the_temperature_makes_of_it,
        "torch.where(noisy, temperatures, 1.0)",
        "temperatures",
    ),
    ("all rows at once", rows_come_in_pieces, "step = ROWS_AT_ONCE_SORTED if sorts else ROWS_AT_ONCE", "step = 10**9"),
    (
        "who wants all gets as many as those before",
        each_row_gets_as_many_as_it_wants,
        "yield start, end, max(num_top[start:end])",
        "yield start, end, max(num_top[0:end])",
    ),
]


@pytest.fixture
def edited(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with planted_in(("logprobs",), [("logprobs", *request.param)]) as made:
        yield made["logprobs"]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_law_holds(law: Any) -> None:
    law(real)


@pytest.mark.parametrize(
    ("law", "edited"),
    [(law, (old, new)) for _, law, old, new in FAULTS],
    indirect=["edited"],
    ids=[report for report, *_ in FAULTS],
)
def test_the_law_fails_with_the_fault(law: Any, edited: ModuleType) -> None:
    with pytest.raises((AssertionError, ValueError)):
        law(edited)
