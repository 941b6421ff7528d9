"""Logprobs of whole engines against float64 log_softmax of HuggingFace's logits, whatever batch, chunk or pool.

Tier A allows logits that differ by 1e-3, so logprobs may by twice that: once in the logit, once in the sum. Ranks and
the most likely tokens are held to the same: a token may change places only with those that lie so close.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.inference.planting import planted_in
from weft.config import EngineConfig
from weft.inference import logprobs, runner
from weft.inference.engine import Engine
from weft.inference.sampling_params import SamplingParams
from weft.inference.token_logprobs import TokenLogprobs
from weft.kernels._jit import runs_on
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.oracle import Oracle
from weft.testing.tiny import save_tiny_model

TOLERANCE = 2e-3
V = 131
LENGTHS = (1, 2, 7, 8, 9, 19, 40)
COUNTS = (None, 0, 1, 5, 20, -1)
PROMPT_COUNTS = (5, None, 0, 1, -1, 20, None, 5, 0, None, 20, 1, 0, 5)


@dataclass
class Answer:
    prompt: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[TokenLogprobs | None, ...]] = field(default_factory=list)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama", eos_token_id=[3, 57, 90])


@pytest.fixture(scope="module")
def judged(folder: Path) -> Callable[..., None]:
    return judge_by(folder)


def judge_by(folder: Path) -> Callable[..., None]:
    """Raises AssertionError unless every answer is told what HuggingFace's logits say of it.

    processed: that logprobs of sampled tokens are after temperature, which divides their errors too.
    """
    oracle = Oracle(open_checkpoint(str(folder)).tokenizer, dtype=torch.float32, device=torch.device("cpu"))

    def judge(answers: Sequence[Answer], *, processed: bool = False) -> None:
        for answer in answers:
            tokens = [*answer.prompt, *answer.token_ids]
            logits = oracle.score(tokens[:1], tokens[1:]).double()
            temperature = (answer.params.temperature or 1.0) if processed else 1.0
            drawn = drawn_from(logits, answer.params) if processed else logits
            expected = torch.log_softmax(drawn / temperature, dim=-1)
            wanted, start = answer.params.logprobs, len(answer.prompt)
            assert len(answer.logprobs) == (0 if wanted is None else len(answer.token_ids))
            for place, one in enumerate(answer.logprobs, start):
                assert_right(one, expected[place - 1], tokens[place], wanted, TOLERANCE / min(1.0, temperature))
            expected, wanted = torch.log_softmax(logits, dim=-1), answer.params.prompt_logprobs
            assert len(answer.prompt_logprobs) == (wanted is not None), "given once, or never"
            for given in answer.prompt_logprobs:
                assert len(given) == start
                assert given[0] is None
                for place, one in enumerate(given[1:], 1):
                    assert_right(one, expected[place - 1], tokens[place], wanted)

    return judge


def drawn_from(logits: Tensor, params: SamplingParams) -> Tensor:
    """After processors and truncation."""
    logits = logits.clone()
    for token, bias in dict(params.logit_bias or ()).items():
        logits[:, token] += bias
    if params.temperature > 0 and params.top_k:
        logits[logits < logits.topk(params.top_k).values[:, -1:]] = -torch.inf
    return logits


def assert_right(
    one: TokenLogprobs | None, expected: Tensor, token: int, num_top: int | None, tolerance: float = TOLERANCE
) -> None:
    assert one is not None
    assert num_top is not None
    assert one.token_id == token
    assert one.logprob == pytest.approx(float(expected[token]), rel=0, abs=tolerance)
    best = 1 + int((expected > expected[token] + tolerance).sum())
    worst = 1 + int((expected > expected[token] - tolerance).sum())
    assert best <= one.rank <= worst
    assert dict(one.top).get(token, one.logprob) == one.logprob, "one number for one token"
    ids, values = [token for token, _ in one.top], torch.tensor([value for _, value in one.top], dtype=torch.float64)
    assert len(ids) == len(set(ids)) == (V if num_top < 0 else num_top)
    torch.testing.assert_close(values, expected[ids], rtol=0, atol=tolerance)
    torch.testing.assert_close(values, expected.sort(descending=True).values[: len(ids)], rtol=0, atol=tolerance)
    assert sorted(one.top, key=lambda entry: (-entry[1], entry[0])) == list(one.top)


def made(max_tokens: int = 10) -> list[Answer]:
    """Requests of every kind: greedy and sampled, with logprobs of either kind, of both, of none."""
    generator = torch.Generator().manual_seed(1)
    answers = []
    for place, length in enumerate((*LENGTHS, *LENGTHS)):
        params = SamplingParams(
            temperature=(0.0, 0.7, 2.5)[place % 3],
            seed=place,
            max_tokens=1 if place == 5 else max_tokens,
            top_k=9 if place % 4 else 0,
            logit_bias={11: 6.0, 12: -100.0} if place % 5 == 2 else None,
            logprobs=COUNTS[place % 6],
            prompt_logprobs=PROMPT_COUNTS[place],
        )
        answers.append(Answer(torch.randint(V, (length,), generator=generator).tolist(), params))
    answers[-1].prompt = answers[6].prompt[:30]  # blocks of another's prompt could be found
    answers[-2].prompt = list(answers[6].prompt)
    assert answers[-2].params.prompt_logprobs is not None
    assert answers[6].params.prompt_logprobs is None
    return answers


def run(
    folder: Path,
    answers: Sequence[Answer],
    *,
    device: str = "cpu",
    steps: Counter[str] | None = None,
    **options: Any,
) -> list[str]:
    """Serve all of them at once; those that gave way. steps: counts how they reached the device."""
    preempted: list[str] = []
    engine = Engine(
        EngineConfig.of(model=str(folder), device=device, **({"max_num_seqs": 4} | options)),
        open_checkpoint(str(folder)),
        observe=lambda plan, _: preempted.extend(plan.preempted_ids),
    )
    for place, answer in enumerate(answers):
        engine.add_request(str(place), answer.prompt, answer.params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = answers[int(output.request_id)]
            assert output.prompt_logprobs is None or not answer.token_ids, "with the first token"
            answer.token_ids += output.new_token_ids
            answer.logprobs += output.logprobs
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs.append(output.prompt_logprobs)
    if steps is not None:
        steps.update(engine.num_steps)
    return preempted


@pytest.mark.parametrize(
    ("options", "gives_way"),
    [
        ({}, False),
        ({"overlap": True}, False),
        ({"max_num_seqs": 1}, False),
        ({"max_num_seqs": 14, "max_chunk_tokens": 1}, False),
        ({"max_chunk_tokens": 7, "overlap": True}, False),
        ({"max_chunk_tokens": 16, "block_size": 4, "num_blocks": 20}, True),
        ({"max_chunk_tokens": 5, "block_size": 4, "num_blocks": 20, "overlap": True}, True),
        ({"attention_backend": "contiguous", "max_chunk_tokens": 9}, False),
        ({"policy": "prefill_first", "enable_prefix_caching": False}, False),
    ],
    ids=str,
)
def test_every_request_is_told_what_huggingface_says(
    folder: Path, judged: Callable[..., None], options: dict[str, Any], gives_way: bool, device: str
) -> None:
    answers = made()
    preempted = run(folder, answers, device=device, **options)
    assert bool(preempted) == gives_way
    judged(answers)
    assert {answer.token_ids[-1] in (3, 57, 90) for answer in answers} == {True, False}, "some stop, some do not"


@pytest.mark.skipif(not runs_on(torch.device("cpu")), reason="Triton is Linux-only, and kernels run on CUDA")
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_steps_by_kernels_give_logprobs_between_steps_in_which_nobody_wants_any(tmp_path: Path, mode: str) -> None:
    """In Triton's interpreter, on a model for which that is quick."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save_tiny_model(tmp_path, "llama", **shape)
    wants = [
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(temperature=0.8, seed=3, max_tokens=3, logprobs=2, top_k=5),
        SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1),
        SamplingParams(temperature=0.8, seed=4, max_tokens=2, logprobs=-1, logit_bias={11: 9.0}),
    ]
    answers = [Answer([place, 5, 6, 7], params) for place, params in enumerate(wants)]
    steps: Counter[str] = Counter()
    options = {"attention_backend": "paged_triton", "operations": "fused", "overlap": True, "logprobs_mode": mode}
    run(folder, answers, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, steps=steps, **options)
    assert steps["plain"] == 1, "what a program cannot do: prompts"
    assert steps["launched"] > 5
    judge_by(folder)(answers, processed=mode == "processed_logprobs")


@pytest.mark.parametrize("overlap", [False, True])
def test_processed_logprobs_are_of_what_is_drawn_from(
    folder: Path, judged: Callable[..., None], overlap: bool, device: str
) -> None:
    answers = made()
    run(folder, answers, device=device, logprobs_mode="processed_logprobs", overlap=overlap, max_chunk_tokens=16)
    judged(answers, processed=True)
    with pytest.raises(AssertionError):
        judged(answers)


def test_logprobs_change_no_token_and_neither_do_neighbours(folder: Path) -> None:
    together, plain, alone = made(), made(), made()
    for answer in plain:
        answer.params = replace(answer.params, logprobs=None, prompt_logprobs=None)
    run(folder, together, overlap=True)
    run(folder, plain)
    for answer in alone:
        run(folder, [answer])
    for one, other, third in zip(together, alone, plain, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        assert [entry.rank for entry in one.logprobs] == [entry.rank for entry in other.logprobs]
        assert not third.logprobs
        assert not third.prompt_logprobs


def test_what_a_prompt_costs_in_memory_does_not_grow_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "ROWS_AT_ONCE", 4)
    asked: list[int] = []
    score = logprobs.score

    def counting(logits: Tensor, token_ids: Tensor, num_top: int) -> object:
        asked.append(len(logits))
        return score(logits, token_ids, num_top)

    monkeypatch.setattr(logprobs, "score", counting)
    (answer,) = [Answer(list(range(100)), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))]
    with Vocabularies() as vocabularies:
        run(folder, [answer])
    assert asked == [4] * 24 + [3]
    assert vocabularies.most_rows == 4


class Vocabularies(torch.utils._python_dispatch.TorchDispatchMode):
    """Records how many rows of the vocabulary the largest tensor holds that anything returns, floats only."""

    most_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            # Weights of the head are as wide the other way, and are there before anything runs.
            if isinstance(value, Tensor) and value.ndim and value.shape[-1] == V and value.is_floating_point():
                self.most_rows = max(self.most_rows, value.numel() // V)
        return result


def serve_and_judge(folder: Path, judged: Callable[..., None]) -> None:
    answers = made()
    run(folder, answers, max_chunk_tokens=7)
    judged(answers)


FAULTS = [
    ("logprobs after temperature", "launch(logits_of, chosen", "launch(lambda some: logits_of(some) / 0.7, chosen"),
    ("a place in the plan for a place among logits", "first = column if row_each else end - count", "first = column"),
    ("prompts off by one", "starts[part.column] + part.first", "starts[part.column] + part.first - 1"),
    ("who had the row before still counts", "self._num_top.pop(admission.row, None)", "pass"),
    ("prompts in one order, scores in another", "for part in plan.prompt_rows:", "for part in plan.prompt_rows[::-1]:"),
    ("what is beside the sampled token", "sampled[chosen]", "sampled[chosen] * 0"),
]


@pytest.fixture
def edited(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with planted_in(("logprobs",), [("logprobs", *request.param)]) as made:
        yield made["logprobs"]


@pytest.mark.parametrize(
    "edited", [(old, new) for _, old, new in FAULTS], indirect=True, ids=[report for report, *_ in FAULTS]
)
def test_faults_are_convicted(
    folder: Path,
    judged: Callable[..., None],
    edited: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "LogprobRows", edited.LogprobRows)
    with pytest.raises((AssertionError, IndexError)):
        serve_and_judge(folder, judged)
