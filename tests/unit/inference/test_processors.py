"""Each processor against HuggingFace's of the same name, and against its law in closed form."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from tests.unit.inference.processed import Asked, plan_of, processed, state_of
from weft.inference.plan import StepPlan
from weft.inference.processing import Processing, rehearse
from weft.inference.processors import exclude_words, penalise_count

VOCAB = 23
EOS = (3, 7)

tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, min_size=2, max_size=20)


def logits_of(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def huggingface(processor: Callable[[Any, Any], Any], token_ids: list[int], logits: Tensor) -> Tensor:
    found: Tensor = processor(torch.tensor([token_ids]), logits.clone())
    return found


@given(token_ids=texts, penalty=st.sampled_from([0.5, 0.9, 1.1, 1.3, 2.0, 1e6]), seed=st.integers(0, 99))
def test_repetition_penalty_equals_huggingfaces_over_prompt_and_output(
    token_ids: list[int], penalty: float, seed: int
) -> None:
    logits = logits_of(seed)
    expected = huggingface(RepetitionPenaltyLogitsProcessor(penalty), token_ids, logits)
    for prompt in (1, len(token_ids)):
        found = processed([Asked(token_ids, prompt, {"repetition_penalty": penalty})], logits)
        assert torch.equal(found, expected)


@given(token_ids=texts, prompt=st.integers(1, 20), least=st.integers(0, 20), seed=st.integers(0, 99))
def test_min_tokens_equals_huggingfaces_for_every_eos(token_ids: list[int], prompt: int, least: int, seed: int) -> None:
    prompt = min(prompt, len(token_ids))
    logits = logits_of(seed)
    expected = huggingface(MinNewTokensLengthLogitsProcessor(prompt, least, list(EOS), device="cpu"), token_ids, logits)
    found = processed([Asked(token_ids, prompt, {"min_tokens": least}, frozenset(EOS))], logits)
    assert torch.equal(found, expected)
    assert bool(found[0, list(EOS)].isinf().all()) == (len(token_ids) - prompt < least)


@given(data=st.data(), token_ids=texts, seed=st.integers(0, 99))
def test_bad_words_equal_huggingfaces(data: st.DataObject, token_ids: list[int], seed: int) -> None:
    """HuggingFace leaves out a word whose beginning is the whole text so far, which is longer than it looks at."""
    said = st.builds(
        lambda start, last: [*token_ids[start:], last], st.integers(1, len(token_ids)), tokens
    )  # words that the text has begun
    any_word = st.lists(tokens, min_size=1, max_size=4)
    words = data.draw(st.lists(said | any_word, min_size=1, max_size=6, unique_by=tuple))
    words = [word for word in words if len(word) <= len(token_ids)] or [[5]]
    logits = logits_of(seed)
    expected = huggingface(NoBadWordsLogitsProcessor(words), token_ids, logits)
    for prompt in (1, len(token_ids)):  # it is the text so far that counts, wherever its prompt ends
        assert torch.equal(processed([Asked(token_ids, prompt, {"bad_words": words})], logits), expected)


def test_a_bad_word_that_begins_with_the_whole_text_is_excluded() -> None:
    found = processed([Asked([4, 5], 1, {"bad_words": [[4, 5, 6], [9, 4, 5, 8]]})], logits_of(0))
    assert found.isinf().nonzero().tolist() == [[0, 6]]


def test_no_token_stands_before_the_first_whichever_a_bad_word_begins_with() -> None:
    words = [[token, 4, token] for token in range(VOCAB)]
    found = processed([Asked([4], 1, {"bad_words": words})], logits_of(0))
    assert not found.isinf().any()


def test_a_bad_word_may_begin_with_any_token_and_waits_for_it() -> None:
    for token in range(VOCAB - 1):
        found = processed([Asked([4, token + 1], 1, {"bad_words": [[token, 6]]})], logits_of(0))
        assert not found.isinf().any()
        found = processed([Asked([4, token], 1, {"bad_words": [[token, 6]]})], logits_of(0))
        assert found.isinf().nonzero().tolist() == [[0, 6]]


def test_with_the_last_of_min_tokens_an_answer_may_end() -> None:
    for said, held_back in ((1, True), (2, True), (3, False), (4, False)):
        found = processed([Asked([4] * (2 + said), 2, {"min_tokens": 3}, frozenset(EOS))], logits_of(0))
        assert bool(found.isinf().any()) == held_back


def test_one_long_word_does_not_make_thousands_of_others_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def seen(logits: Tensor, places: Tensor, beginnings: Tensor, *rest: Tensor) -> None:
        sizes.append(beginnings.numel())
        exclude_words(logits, places, beginnings, *rest)

    monkeypatch.setattr("weft.inference.step_processing.exclude_words", seen)
    words = [[token % VOCAB, token // VOCAB] for token in range(VOCAB**2)] + [[5] * 60]
    found = processed([Asked([4, 5], 1, {"bad_words": words})], logits_of(0))
    assert found.isinf().all()
    assert sum(sizes) <= VOCAB**2 + 64


@given(
    biases=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.0, 0.25, 100.0]), min_size=1),
    seed=st.integers(0, 99),
)
def test_logit_bias_equals_huggingfaces(biases: dict[int, float], seed: int) -> None:
    logits = logits_of(seed)
    sequences = {(token,): bias for token, bias in biases.items()}
    expected = huggingface(SequenceBiasLogitsProcessor(sequences), [1, 2], logits)
    assert torch.equal(processed([Asked([1, 2], 1, {"logit_bias": biases})], logits), expected)


@given(allowed=st.lists(tokens, min_size=1), seed=st.integers(0, 99))
def test_allowed_token_ids_are_all_but_huggingfaces_suppressed_ones(allowed: list[int], seed: int) -> None:
    logits = logits_of(seed)
    suppressed = [token for token in range(VOCAB) if token not in allowed]
    expected = huggingface(SuppressTokensLogitsProcessor(suppressed, device="cpu"), [1], logits)
    assert torch.equal(processed([Asked([1], 1, {"allowed_token_ids": allowed})], logits), expected)


@given(
    presence=st.sampled_from([0.0, -2.0, 0.7, 2.0]),
    frequency=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    repetition=st.sampled_from([1.0, 1.7]),
    token_ids=texts,
    prompt=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_penalties_are_what_their_law_says(
    repetition: float, frequency: float, presence: float, token_ids: list[int], prompt: int, seed: int
) -> None:
    """Presence and frequency count the output alone; repetition sees prompt and output, and comes first."""
    prompt = min(prompt, len(token_ids))
    logits = logits_of(seed)
    expected = logits[0].clone()
    rounded = {name: torch.tensor(value) for name, value in (("r", repetition), ("f", frequency), ("p", presence))}
    for token in set(token_ids):
        expected[token] = expected[token] / rounded["r"] if expected[token] > 0 else expected[token] * rounded["r"]
    for token, count in Counter(token_ids[prompt:]).items():
        expected[token] = expected[token] - rounded["f"] * count
        expected[token] = expected[token] - rounded["p"]
    params = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
    assert torch.equal(processed([Asked(token_ids, prompt, params)], logits)[0], expected)


def test_a_prompt_of_one_token_said_thrice_is_penalised_as_reported() -> None:
    """Reported as K06-8: presence hit prompt tokens, and repetition missed them at the first step."""
    logits = torch.full((1, VOCAB), 2.0)
    for params, after_prompt, after_one in (
        ({"presence_penalty": 2.0}, 2.0, 0.0),
        ({"frequency_penalty": 1.5}, 2.0, 0.5),
        ({"repetition_penalty": 2.0}, 1.0, 1.0),
    ):
        assert processed([Asked([4, 4, 4], 3, params)], logits)[0, 4] == after_prompt
        assert processed([Asked([4, 4, 4, 4], 3, params)], logits)[0, 4] == after_one


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """Any request, with any processors or none."""
    token_ids = draw(texts)
    given_words = [*token_ids[-2:], draw(tokens)], [draw(tokens)], [token_ids[-1], draw(tokens)]
    chosen: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "allowed_token_ids": st.lists(tokens, min_size=1),
                "bad_words": st.lists(st.sampled_from(given_words), min_size=1),
                "min_tokens": st.integers(0, 12),
                "logit_bias": st.dictionaries(tokens, st.sampled_from([-3.0, 100.0])),
                "repetition_penalty": st.sampled_from([0.5, 1.4]),
                "frequency_penalty": st.sampled_from([-0.5, 0.5]),
                "presence_penalty": st.sampled_from([-0.5, 0.5]),
            },
        )
    )
    return Asked(token_ids, draw(st.integers(1, len(token_ids))), chosen, frozenset(EOS))


@given(asked=st.lists(requests(), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_row_is_processed_beside_others_as_it_is_alone(asked: list[Asked], seed: int) -> None:
    logits = logits_of(seed, rows=len(asked))
    before = logits.clone()
    together = processed(asked, logits)
    assert torch.equal(logits, before), "whoever watches logits still sees them raw"
    for row, one in enumerate(asked):
        assert torch.equal(together[row], processed([one], logits[row : row + 1])[0])


def test_what_is_counted_in_is_clear_again_for_the_next_step() -> None:
    places, counted, penalty = torch.tensor([[1, 1, 2]]), torch.ones(1, 3), torch.ones(1, 1)
    zeros = torch.zeros(1, 4)
    for _ in range(2):
        logits = torch.zeros(1, 4)
        penalise_count(logits, places, counted, penalty, penalty, zeros)
        assert logits.tolist() == [[0.0, -3.0, -2.0, 0.0]]
        assert not zeros.any()


def test_processors_come_in_the_order_that_is_written_down() -> None:
    """Allowed, bad words, stop tokens and bias, penalties: a bias is penalised, and nothing brings a token back."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    params = {"allowed_token_ids": [0, 1, 2], "bad_words": [[1]], "logit_bias": {1: 100, 2: 1, 3: 100}}
    found = processed([Asked([2], 1, params | {"repetition_penalty": 2.0})], logits)
    assert found.tolist() == [[1.0, -math.inf, 2.0, -math.inf]]


def test_processing_reads_nothing_back_from_the_device() -> None:
    params = {
        "allowed_token_ids": [1, 2, 3],
        "bad_words": [[1], [2, 3]],
        "min_tokens": 2,
        "logit_bias": {1: 1},
        "repetition_penalty": 2.0,
        "frequency_penalty": 1.0,
        "presence_penalty": 1.0,
    }
    with FakeTensorMode():
        state, plan = state_of("cuda"), plan_of([Asked([1, 2, 3], 2, params, frozenset(EOS)), Asked([1], 1)])
        processing = Processing(state)
        state.apply(plan)
        processing.apply(plan)
        lengths = torch.tensor([3, 1], device="cuda")
        found = processing(plan, torch.zeros(2, VOCAB, dtype=torch.bfloat16, device="cuda"), lengths, row_each=True)
    assert found.shape == (2, VOCAB)
    assert found.dtype == torch.float32


def test_what_is_rehearsed_is_as_large_as_what_is_done() -> None:
    """Two tensors of the vocabulary for every row, and the tokens so far."""

    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.elements: list[int] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.elements.append(result.numel())
            return result

    with Sizes() as sizes:
        rehearse(3, 1000, 20, torch.device("cpu"))
    assert sizes.elements.count(3 * 1000) >= 2
    assert 3 * 20 in sizes.elements


def test_processors_joined_for_one_step_serve_no_other() -> None:
    """The same rows again: of somebody else, who asks for nothing; or where each request has a row of logits."""
    state = state_of()
    processing = Processing(state)
    biased = Asked([3], 1, {"logit_bias": {4: 5.0}})

    def changed(plan: StepPlan, rows: int, *, row_each: bool) -> list[int]:
        ones = torch.ones(rows, dtype=torch.int64)
        logits = processing(plan, torch.zeros(rows, 8), ones, row_each=row_each)
        return [row for row, value in enumerate(logits[:, 4].tolist()) if value]

    both = plan_of([biased, biased])
    for apply in (state.apply, processing.apply):
        apply(both)
    assert changed(both, 2, row_each=False) == [0, 1]
    other = plan_of([Asked([3], 1), biased])
    processing.apply(replace(other, admissions=other.admissions[:1]))
    assert changed(other, 2, row_each=False) == [1]
    without = replace(other, num_logit_rows=(0, 1), admissions=())
    assert changed(without, 1, row_each=False) == [0]
    assert changed(without, 2, row_each=True) == [1]


def test_presence_is_taken_once_from_tokens_that_count_and_not_from_others() -> None:
    logits, zeros = torch.zeros(1, 5), torch.zeros(1, 5)
    places, counted = torch.tensor([[0, 2, 2, 3]]), torch.tensor([[1.0, 1.0, 1.0, 0.0]])  # 3 is of the prompt alone
    penalise_count(logits, places, counted, None, torch.tensor([[0.5]]), zeros)
    assert logits.tolist() == [[-0.5, 0.0, -0.5, 0.0, 0.0]]
    assert not zeros.any()
