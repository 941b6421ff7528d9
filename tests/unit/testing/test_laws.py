"""Each law convicts the engine that breaks it: a toy engine over the toy model of hashes, with one fault at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.models.checkpoint.interface import GenerationDefaults, TokenizerLocation
from weft.testing.continuation import Continuation
from weft.testing.engines import open_engine
from weft.testing.engines.interface import Ability, Answer, Job, ModelUnderTest
from weft.testing.finding import Outcome
from weft.testing.laws import LAWS, judge
from weft.testing.toy import VOCAB_SIZE, next_token
from weft.testing.trial import Trial
from weft.tokenizer.hub import HubTokenizer

EOS = 7
PROMPTS = [(1, 2, 3), (4, 5), (9, 8, 7, 6), (20,), (30, 31), (41, 42, 43)]
LENGTH = 14
LOGPROB_LAW = "logprobs equal huggingface"
LOGIT_LAW = "logits equal huggingface"


def row(tokens: Sequence[int]) -> Tensor:
    """Logits after these tokens: the toy model's choice leads by 1, the rest follow in steps."""
    logits = torch.linspace(0.0, 1.0, VOCAB_SIZE)
    logits[next_token(tokens)] = 2.0
    return logits


def said_after(
    prompt: Sequence[int], count: int, stops: Sequence[int] = (), choose: Callable[[list[int]], int] = next_token
) -> Continuation:
    tokens, rows = list(prompt), []
    while len(rows) < count and not (rows and tokens[-1] in {EOS, *stops}):
        rows.append(row(tokens))
        tokens.append(choose(tokens))
    new = tuple(tokens[len(prompt) :])
    reason: Any = "stop" if new[-1] in {EOS, *stops} else "length"
    return Continuation(prompt_token_ids=tuple(prompt), token_ids=new, logits=torch.stack(rows), finish_reason=reason)


class ToyReference:
    def generate(
        self, prompt_token_ids: Sequence[int], max_new_tokens: int, *, stop_token_ids: Sequence[int] = ()
    ) -> Continuation:
        return said_after(prompt_token_ids, max_new_tokens, stop_token_ids)

    def score(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        tokens = [*prompt_token_ids, *token_ids]
        return torch.stack([row(tokens[:end]) for end in range(len(prompt_token_ids), len(tokens))])


class ToyEngine:
    """Sound without a fault. `fault` changes the answer to the job at a place among others."""

    description = "toy"

    def __init__(self, fault: "Fault | None" = None) -> None:
        self.fault = fault or Fault()
        self.lacks: dict[Ability, str] = {}
        self.num_seen = 0

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        asked = self.fault.jobs(list(jobs))
        return self.fault.answers([self._answer(job, place, asked) for place, job in enumerate(asked)])

    def _answer(self, job: Job, place: int, jobs: Sequence[Job]) -> Answer:
        self.num_seen += 1

        def choose(tokens: list[int]) -> int:
            if job.seed is None:
                return self.fault.token(next_token(tokens), tokens, len(jobs), self.num_seen)
            return hash((-9, self.fault.seed(job.seed, place), *tokens)) % VOCAB_SIZE

        said = said_after(job.prompt_token_ids, job.max_new_tokens, job.stop_token_ids, choose)
        scores = said.logits.log_softmax(dim=-1).gather(-1, torch.tensor(said.token_ids)[:, None])[:, 0]
        answer = Answer(
            token_ids=said.token_ids,
            finish_reason=said.finish_reason,
            logits=said.logits,
            logprobs=tuple(scores.tolist()),
        )
        return self.fault.answer(answer)

    def close(self) -> None: ...


def _same(value: Any, *_: Any) -> Any:
    return value


@dataclass(frozen=True)
class Fault:
    jobs: Callable[[list[Job]], list[Job]] = _same
    answers: Callable[[list[Answer]], list[Answer]] = _same
    answer: Callable[[Answer], Answer] = _same
    token: Callable[[int, list[int], int, int], int] = _same
    seed: Callable[[int, int], int] = _same


@dataclass
class ToyCheckpoint:
    config: dict[str, Any] = field(default_factory=dict)
    generation: GenerationDefaults = field(default_factory=lambda: GenerationDefaults(eos_token_ids=(EOS,), options={}))
    stored_dtype: str | None = None
    tokenizer: TokenizerLocation = field(default_factory=lambda: TokenizerLocation(folder=Path()))
    num_tensors: int = 0

    def tensors(self) -> Any:
        return iter(())


def trial(engine: ToyEngine, dtype: torch.dtype = torch.float32) -> Trial:
    model = ModelUnderTest(
        name="toy", checkpoint=ToyCheckpoint(), dtype=dtype, device=torch.device("cpu"), max_model_len=512
    )
    return Trial(engine=engine, reference=ToyReference(), model=model, prompts=PROMPTS, max_new_tokens=LENGTH)


def outcomes(engine: ToyEngine, dtype: torch.dtype = torch.float32) -> dict[str, Outcome]:
    on_trial = trial(engine, dtype)
    return {law.name: judge(law, on_trial).outcome for law in LAWS}


def broken_by(fault: Fault) -> set[str]:
    return {law for law, outcome in outcomes(ToyEngine(fault)).items() if outcome is Outcome.BROKEN}


def test_a_sound_engine_is_acquitted_by_every_law() -> None:
    found = outcomes(ToyEngine())
    assert found.pop("flips lie within huggingfaces own noise") is Outcome.NOT_JUDGED
    assert set(found.values()) == {Outcome.HOLDS}


def later(token: int, tokens: list[int], num_jobs: int, num_seen: int) -> int:
    return (token + 1) % VOCAB_SIZE if len(tokens) == 10 else token


def cut_short(jobs: list[Job]) -> list[Job]:
    return [replace(job, prompt_token_ids=job.prompt_token_ids[-128:]) for job in jobs]


def one_stop_for_all(jobs: list[Job]) -> list[Job]:
    stops = tuple(stop for job in jobs for stop in job.stop_token_ids)
    return [replace(job, stop_token_ids=stops) for job in jobs]


def without_the_stop(answer: Answer) -> Answer:
    tokens = answer.token_ids
    assert tokens is not None
    if answer.finish_reason != "stop" or tokens[-1] == EOS:
        return answer
    assert answer.logits is not None
    assert answer.logprobs is not None
    return replace(answer, token_ids=tokens[:-1], logits=answer.logits[:-1], logprobs=answer.logprobs[:-1])


def _by_length(answer: Answer) -> Answer:
    return replace(answer, finish_reason="length")


EQUALITY = {"tokens equal huggingface", "prompts at the edges of blocks equal huggingface"}
TWICE = {"batch mates change nothing", "a prompt again says the same"}
STOPS, SEEDS = "stop token ids end an answer", "a seed reproduces and another differs"
LENGTHS, REASONS = "an answer ends at its own length", "finish reasons equal huggingface"

FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "a wrong token": (Fault(token=later), EQUALITY),
    "a prompt's beginning is lost after 128 tokens": (
        Fault(jobs=cut_short),
        {"prompts at the edges of blocks equal huggingface"},
    ),
    "one token too many": (
        Fault(jobs=lambda jobs: [replace(job, max_new_tokens=job.max_new_tokens + 1) for job in jobs]),
        {*EQUALITY, LENGTHS},
    ),
    "every answer as long as the first": (
        Fault(jobs=lambda jobs: [replace(job, max_new_tokens=jobs[-1].max_new_tokens) for job in jobs]),
        {LENGTHS},
    ),
    "an answer ends a token early": (
        Fault(jobs=lambda jobs: [replace(job, max_new_tokens=max(job.max_new_tokens - 1, 1)) for job in jobs]),
        {*EQUALITY, LENGTHS},
    ),
    "stop ids are ignored": (Fault(jobs=lambda jobs: [replace(job, stop_token_ids=()) for job in jobs]), {STOPS}),
    "one request's stop ids end all": (Fault(jobs=one_stop_for_all), {STOPS}),
    "stop ids of others end a request that has none": (
        Fault(
            jobs=lambda jobs: [
                job if job.stop_token_ids else lent for job, lent in zip(jobs, one_stop_for_all(jobs), strict=True)
            ]
        ),
        {STOPS},
    ),
    "the stop id is left out": (Fault(answer=without_the_stop), {STOPS}),
    "every end is called length": (
        Fault(answer=lambda answer: replace(answer, finish_reason="length")),
        {REASONS, STOPS},
    ),
    "an end that nobody knows": (
        Fault(answer=lambda answer: replace(answer, finish_reason="eos")),
        {law.name for law in LAWS} - {"flips lie within huggingfaces own noise"},
    ),
    "answers in another order": (
        Fault(answers=lambda answers: answers[::-1]),
        {*EQUALITY, LENGTHS, STOPS, SEEDS, LOGIT_LAW, LOGPROB_LAW, "batch mates change nothing"},
    ),
    "a batch of eight or more is computed otherwise": (
        Fault(token=lambda token, tokens, num_jobs, seen: (token + (num_jobs >= 8)) % VOCAB_SIZE),
        {"prompts at the edges of blocks equal huggingface", "batch mates change nothing"},
    ),
    "an even request is computed otherwise": (
        Fault(token=lambda token, tokens, num_jobs, seen: (token + seen % 2) % VOCAB_SIZE),
        {*EQUALITY, *TWICE, STOPS},
    ),
    "three that are the same at once are computed otherwise": (
        Fault(token=lambda token, tokens, num_jobs, seen: (token + (num_jobs == 3)) % VOCAB_SIZE),
        {"a prompt again says the same"},
    ),
    "who is alone is said to end by length": (
        Fault(answers=lambda answers: [_by_length(one) for one in answers] if len(answers) == 1 else answers),
        {"batch mates change nothing"},
    ),
    "one seed for all": (Fault(seed=lambda seed, place: 0), {SEEDS}),
    "a seed counts from the request's place": (Fault(seed=lambda seed, place: seed + place), {SEEDS}),
    "logits off by twice the tolerance": (
        Fault(answer=lambda answer: replace(answer, logits=answer.logits + 2e-3)),  # type: ignore[operator]
        {LOGIT_LAW},
    ),
    "logprobs off by twice the tolerance": (
        Fault(answer=lambda answer: replace(answer, logprobs=tuple(each + 4e-3 for each in answer.logprobs or ()))),
        {LOGPROB_LAW},
    ),
    "logprobs that are not numbers": (
        Fault(answer=lambda answer: replace(answer, logprobs=(float("nan"),) * len(answer.logprobs or ()))),
        {LOGPROB_LAW},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_convicted_by_its_laws_and_no_other(name: str) -> None:
    fault, laws = FAULTS[name]
    assert broken_by(fault) == laws


def test_every_law_of_float32_convicts_some_fault() -> None:
    convicting = set().union(*(laws for _, laws in FAULTS.values()))
    assert {law.name for law in LAWS} - convicting == {"flips lie within huggingfaces own noise"}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(answer=lambda answer: replace(answer, logprobs=None)),
        Fault(answer=lambda answer: replace(answer, finish_reason=None)),
        Fault(answer=lambda answer: replace(answer, logprobs=(answer.logprobs or ())[:-1])),
        Fault(answers=lambda answers: answers[:-1]),
    ],
)
def test_what_is_claimed_and_not_given_breaks_every_law_that_asks(fault: Fault) -> None:
    judged = set(outcomes(ToyEngine(fault)).values())
    assert judged == {Outcome.BROKEN, Outcome.NOT_JUDGED}


def test_an_engine_that_fails_has_broken_the_law_and_says_how() -> None:
    def fail(jobs: list[Job]) -> list[Job]:
        raise RuntimeError("out of blocks")

    finding = judge(LAWS[0], trial(ToyEngine(Fault(jobs=fail))))
    assert (finding.outcome, finding.words) == (Outcome.BROKEN, "the engine failed: RuntimeError: out of blocks")


def test_what_an_engine_lacks_is_not_judged_and_the_reason_is_its_own() -> None:
    engine = ToyEngine()
    engine.lacks = {"seeds": "one seed for all", "logits": "none", "finish_reasons": "none", "stop_token_ids": "none"}
    found = {law.name: judge(law, trial(engine)) for law in LAWS}
    silent = {name for name, finding in found.items() if finding.outcome is Outcome.NOT_JUDGED}
    assert silent == {SEEDS, LOGIT_LAW, REASONS, STOPS, "flips lie within huggingfaces own noise"}
    assert found[SEEDS].words == "no seeds: one seed for all"
    engine.lacks = {"dtype": "the server chose it"}
    judged = {name for name, outcome in outcomes(engine).items() if outcome is not Outcome.NOT_JUDGED}
    assert judged == {REASONS, LENGTHS}


def test_a_failure_shows_both_around_the_first_difference() -> None:
    finding = judge(LAWS[0], trial(ToyEngine(Fault(token=later))))
    lines = finding.words.splitlines()
    assert lines[0].endswith("of 6 answers differ:")
    assert "step 8: token 44, the reference has 43; its margin is 1" in lines[1]
    assert [line.split()[0] for line in lines[2:4]] == ["reference", "engine"]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed_is_no_engine_that_fails() -> None:
    with pytest.raises(ConfigError, match="engine vllm needs the package vllm"):
        open_engine("vllm", trial(ToyEngine()).model)


class Words(HubTokenizer):
    """A token is its number, written out."""

    def __init__(self) -> None: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]


@pytest.mark.parametrize(("fault", "outcome"), [(Fault(), Outcome.HOLDS), (Fault(token=later), Outcome.BROKEN)])
def test_an_engine_that_shows_text_alone_is_judged_by_it(fault: Fault, outcome: Outcome) -> None:
    def told(answer: Answer) -> Answer:
        return Answer(text=Words().decode(answer.token_ids or ()), finish_reason=answer.finish_reason)

    engine = ToyEngine(replace(fault, answer=told))
    engine.lacks = dict.fromkeys(("token_ids", "logits", "logprobs"), "it shows text alone")
    on_trial = trial(engine)
    finding = judge(LAWS[0], replace(on_trial, model=replace(on_trial.model, tokenizer=Words())))
    assert finding.outcome is outcome
    assert ("6 texts" if outcome is Outcome.HOLDS else "6 answers differ") in finding.words


class NarrowReference(ToyReference):
    """Its second token lies `margin` behind; its own two computations differ by `noise`, in the second token."""

    def __init__(self, margin: float, noise: float) -> None:
        self.margin, self.noise = margin, noise

    def _narrowed(self, logits: Tensor, noise: float) -> Tensor:
        logits = logits.clone()
        second = (logits.argmax(dim=-1) + 1) % VOCAB_SIZE
        logits[torch.arange(len(logits)), second] = 2.0 - self.margin + noise
        return logits

    def generate(
        self, prompt_token_ids: Sequence[int], max_new_tokens: int, *, stop_token_ids: Sequence[int] = ()
    ) -> Continuation:
        said = said_after(prompt_token_ids, max_new_tokens, stop_token_ids)
        return replace(said, logits=self._narrowed(said.logits, 0.0))

    def score(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        return self._narrowed(super().score(prompt_token_ids, token_ids), self.noise)


@pytest.mark.parametrize(
    ("margin", "noise", "wrong_steps", "outcome", "words"),
    [
        (0.05, 0.04, (), Outcome.HOLDS, "0 of 72 positions flip"),
        (0.05, 0.04, (12, 13), Outcome.HOLDS, "2 of 72 positions flip, at most 2"),
        (0.50, 0.04, (5,), Outcome.BROKEN, "1 flips beyond HuggingFace's own noise"),
        (0.05, 0.04, (0, 5, 13), Outcome.BROKEN, "3 of 72 positions flip, at most 2"),
        (0.05, 0.06, (0, 5, 13), Outcome.HOLDS, "3 of 72 positions flip, at most 144"),
    ],
)
def test_in_a_narrow_dtype_flips_are_excused_as_far_as_the_references_own(
    margin: float, noise: float, wrong_steps: tuple[int, ...], outcome: Outcome, words: str
) -> None:
    def flips(token: int, tokens: list[int], num_jobs: int, num_seen: int) -> int:
        return (token + 1) % VOCAB_SIZE if tokens[0] == 20 and len(tokens) - 1 in wrong_steps else token

    (law,) = [law for law in LAWS if law.dtypes == "narrow"]
    on_trial = replace(trial(ToyEngine(Fault(token=flips)), torch.bfloat16), reference=NarrowReference(margin, noise))
    finding = judge(law, on_trial)
    assert finding.outcome is outcome
    assert words in finding.words


@pytest.mark.parametrize(("prompts", "outcome"), [({20}, Outcome.HOLDS), ({20, 30}, Outcome.BROKEN)])
def test_a_tie_is_excused_and_a_second_one_is_too_many(prompts: set[int], outcome: Outcome) -> None:
    def flips(token: int, tokens: list[int], num_jobs: int, num_seen: int) -> int:
        return (token + 1) % VOCAB_SIZE if tokens[0] in prompts and len(tokens) == 5 else token

    finding = judge(LAWS[0], replace(trial(ToyEngine(Fault(token=flips))), reference=NarrowReference(0.05, 0.04)))
    assert finding.outcome is outcome
    assert f"{len(prompts)} ties" in finding.words


def test_in_a_narrow_dtype_an_answer_that_ends_early_is_no_flip() -> None:
    (law,) = [law for law in LAWS if law.dtypes == "narrow"]
    early = Fault(jobs=lambda jobs: [replace(job, max_new_tokens=job.max_new_tokens - 1) for job in jobs])
    finding = judge(law, trial(ToyEngine(early), torch.bfloat16))
    assert (finding.outcome, finding.words) == (Outcome.BROKEN, "prompt 0 ends at step 5, the reference at 6")
