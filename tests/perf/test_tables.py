"""Tables to look at while working on what every token passes on the host: `pytest tests/perf --benchmark-only`.

Seconds of one machine and one moment. Nothing is compared with them, and no other run collects them (`conftest.py`).
"""

from typing import Any

import pytest
import torch

from weft.batch import SamplingRows, Truncation
from weft.benchmark.experiments.scheduler import Office, SchedulerOptions
from weft.inference.block_allocator import BlockAllocator
from weft.inference.sampler import GumbelSampler
from weft.models.checkpoint.source import open_checkpoint
from weft.tokenizer.detokenizer import detokenizer
from weft.tokenizer.hub import HubTokenizer

pytestmark = pytest.mark.perf

ROUNDS = 50
_TEXT = "Whoever reads this pays for each word: 你好, עברית, 👩\u200d🚀 and `for token in tokens`.\n" * 8


@pytest.mark.parametrize("running", [8, 64, 256])
def test_a_decode_step_of_the_scheduler(running: int, benchmark: Any) -> None:
    office = Office(SchedulerOptions(pools="10000", running=running, waiting=8), 10_000)
    # Each step grows the requests: so many rounds, and not as many as the clock allows.
    seconds = benchmark.pedantic(office.step, rounds=ROUNDS, warmup_rounds=4)
    assert seconds > 0
    assert len(office.scheduler.running) == running


def test_blocks_taken_and_given_back(benchmark: Any) -> None:
    allocator = BlockAllocator(10_000)

    def turn() -> None:
        blocks = allocator.allocate(64)
        assert blocks is not None
        allocator.release(blocks)

    benchmark(turn)
    assert allocator.num_free == 10_000


def test_an_answer_to_text(benchmark: Any) -> None:
    location = open_checkpoint("smollm2-135m").tokenizer
    tokenizer = HubTokenizer(location.folder, location.gguf_file)
    tokens = tokenizer.encode(_TEXT, add_special_tokens=False)

    def answer() -> str:
        pieces = detokenizer(tokenizer, [])
        return "".join([*map(pieces.push, tokens), pieces.finish()])

    assert benchmark(answer) == _TEXT
    benchmark.extra_info["tokens"] = len(tokens)


@pytest.mark.parametrize("how", ["greedy", "drawn", "cut"])
def test_a_token_for_each_of_64_rows(how: str, benchmark: Any) -> None:
    logits = torch.randn(64, 49_152, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(64)
    cut = Truncation(top_k=torch.full((64,), 50), top_p=0.9 * ones, min_p=0 * ones)
    rows = SamplingRows(
        temperatures=(how != "greedy") * ones,
        seeds=torch.arange(64),
        positions=torch.arange(64),
        any_noise=how != "greedy",
        truncation=cut if how == "cut" else None,
    )
    tokens = benchmark.pedantic(GumbelSampler(), args=(logits, rows), rounds=5, warmup_rounds=1)
    assert tokens.shape == (64,)
