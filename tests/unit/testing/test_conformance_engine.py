"""Somebody else's engine before the laws: acquitted where it is sound, convicted by name and prompt where it is not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.unit.testing.test_laws import PROMPTS, Fault, ToyCheckpoint, ToyEngine, ToyReference
from weft.testing import run_engine_conformance
from weft.testing.conformance.suite import ConformanceError, ConformanceReport
from weft.testing.engines.interface import Answer, Job, ModelUnderTest
from weft.testing.finding import Outcome
from weft.testing.toy import VOCAB_SIZE

TOY = ModelUnderTest(
    name="toy", checkpoint=ToyCheckpoint(), dtype=torch.float32, device=torch.device("cpu"), max_model_len=512
)


def judged(fault: Fault | None = None, **lacks: str) -> ConformanceReport:
    def toy(model: ModelUnderTest, argument: str | None) -> ToyEngine:
        engine = ToyEngine(fault)
        engine.lacks |= lacks  # type: ignore[arg-type]
        return engine

    return run_engine_conformance(toy, model=TOY, prompts=PROMPTS, max_new_tokens=14, reference=ToyReference())


def without_stops(jobs: list[Job]) -> list[Job]:
    return [replace(job, stop_token_ids=()) for job in jobs]


def one_more(jobs: list[Job]) -> list[Job]:
    return [replace(job, max_new_tokens=job.max_new_tokens + 1) for job in jobs]


def beside_others(token: int, tokens: list[int], num_jobs: int, num_seen: int) -> int:
    return (token + 1) % VOCAB_SIZE if num_jobs > 1 and len(tokens) == 10 else token


# vllm#4180: ends are lost on the way. vllm#46243: one token too many. unsloth#3699: positions of the longest prompt
# are everybody's. vllm#51226: a seed is the batch's.
FAULTS = {
    "stop token ids end an answer": Fault(jobs=without_stops),
    "an answer ends at its own length": Fault(jobs=one_more),
    "batch mates change nothing": Fault(token=beside_others),
    "a seed reproduces and another differs": Fault(seed=lambda seed, place: seed + place),
}


def test_a_sound_engine_is_acquitted_and_what_it_lacks_is_said() -> None:
    report = judged(logprobs="a toy", seeds="greedy alone")
    assert report.not_judged["logprobs equal huggingface"] == "no logprobs: a toy"
    assert report.not_judged["a seed reproduces and another differs"] == "no seeds: greedy alone"
    assert report.kind == "engine"
    assert report.subject == "toy"


@pytest.mark.parametrize("law", FAULTS)
def test_a_faulty_one_is_convicted_by_its_law(law: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        judged(FAULTS[law])
    assert law in caught.value.report.laws(Outcome.BROKEN)
    assert f"broken: {law}: " in str(caught.value)


def test_an_engine_that_fails_is_convicted_and_closed() -> None:
    closed = []

    class Failing(ToyEngine):
        def answer(self, jobs: Sequence[Job]) -> list[Answer]:
            raise RuntimeError("out of blocks")

        def close(self) -> None:
            closed.append(self)

    with pytest.raises(ConformanceError, match="the engine failed: RuntimeError: out of blocks"):
        run_engine_conformance(lambda model, argument: Failing(), model=TOY, prompts=PROMPTS, reference=ToyReference())
    assert len(closed) == 1
