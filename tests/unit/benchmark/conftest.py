"""A tiny model to benchmark, and systems whose clock and tokens are made up."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.test_llm import save_text_model
from weft.benchmark.measure import Answer, Outcome
from weft.benchmark.workload import Workload
from weft.testing.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its first tokens include its EOS, which no benchmark may stop at."""
    return str(save_tiny_model(tmp_path_factory.mktemp("bench"), "llama", eos_token_id=list(range(40))))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a tokenizer."""
    return str(save_text_model(tmp_path_factory.mktemp("bench_text"), bos=False))


@dataclass
class FakeSystem:
    """Answers token i of job j with 100 j + i, one each `step_s`, all jobs at once; `wrong` jobs end otherwise."""

    step_s: float
    wrong: tuple[int, ...] = ()
    version: str = "1"
    runs: int = 0

    def run(self, workload: Workload, advance: Callable[[], None]) -> Outcome:
        self.runs += 1
        answers = []
        for place, job in enumerate(workload.jobs):
            tokens = [100 * place + index for index in range(job.num_output_tokens)]
            if place in self.wrong:
                tokens[-1] += 1
            times = [self.step_s * (index + 1) for index in range(len(tokens))]
            answers.append(Answer(token_ids=tuple(tokens), times=tuple(times)))
            advance()
        return Outcome(answers=tuple(answers), elapsed_s=max(answer.times[-1] for answer in answers))

    def close(self) -> None:
        pass


@pytest.fixture
def fake() -> type[FakeSystem]:
    return FakeSystem


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"
