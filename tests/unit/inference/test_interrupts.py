"""Ctrl-C at any line of a step, in plain Python: whoever is left can be aborted, and the engine is as good as new."""

from itertools import count
from types import CodeType

import pytest

from tests.unit.inference.interrupts import interrupted_at
from tests.unit.inference.toy_bench import Bench
from weft.inference import block_allocator, draft, pipeline, prefix_cache, prompt_scores, scheduler

X = [1, 2, 3, 4, 5, 6]
PARTS = {module.__file__ for module in (block_allocator, draft, pipeline, prefix_cache, prompt_scores, scheduler)}
STRIDE = 71


def decides(code: CodeType) -> bool:
    return code.co_filename in PARTS


def served(bench: Bench) -> None:
    """Chunks, a prompt that is scored, another from the cache, somebody who gives way, somebody who ends early."""
    bench.add("a", X, 5, prompt_logprobs=1, logprobs=1)
    bench.add("b", [7, 8], 9)
    bench.add("c", X, 4)
    bench.add("d", [9], 3)
    while bench.scheduler.has_requests:
        bench.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupt_leaves_neither_rows_nor_blocks_behind(overlap: bool) -> None:
    line, gave_way, copied = 1, 0, 0
    while True:
        bench = Bench(scheduler, num_blocks=8, block_size=2, max_num_seqs=3, chunk=4, overlap=overlap)
        if not interrupted_at(line, lambda bench=bench: served(bench), counts=decides):  # type: ignore[misc]
            break
        for request_id in ("a", "b", "c", "d"):
            bench.scheduler.finish(request_id, "abort")
        assert not bench.scheduler.has_requests
        bench.scheduler.check_idle()
        bench.scheduler._allocator.check()
        for said in (bench.said, bench.expected):
            said.clear()
        served(bench)
        assert bench.said == bench.expected
        for request_id, request in bench.requests.items():
            bench.check_logprobs(request_id, request)
        assert not bench.scheduler._prompt_scores
        bench.scheduler.check_idle()
        gave_way += bool(bench.preempted)
        copied += any(plan.block_copies for plan in bench.plans)
        line += STRIDE  # every line in the end, as no two steps are alike
    assert min(gave_way, copied, line - 1000) > 0, (gave_way, copied, line)


def test_an_interrupt_at_any_line_of_an_admission_leaves_the_request_in_one_place() -> None:
    def admits(code: CodeType) -> bool:
        return decides(code) and "_admit" in code.co_name

    for line in count(1):
        bench = Bench(scheduler, num_blocks=8, block_size=2, max_num_seqs=1)
        bench.add("a", X, 2)
        if not interrupted_at(line, bench.step, counts=admits):
            break
        assert (bench.scheduler.num_waiting, bench.scheduler.running) == (1, ()), line
        bench.run()
    assert line > 20, "an admission has more lines"


@pytest.mark.parametrize("name", ["add", "_end"])
def test_an_interrupt_in_coming_or_going_leaves_no_count_and_no_debt_behind(name: str) -> None:
    """Of tokens that wait, and of prompts that are to be scored: what is too much of either stays for good."""

    def concerned(code: CodeType) -> bool:
        return decides(code) and code.co_name in (name, "forget")

    for line in count(1):
        bench = Bench(scheduler, num_blocks=8, block_size=2, max_num_seqs=1)
        bench.add("a", X, 3, prompt_logprobs=1)
        bench.step()
        bench.add("b", [7, 8], 2, prompt_logprobs=1)

        def comes_and_goes(bench: Bench = bench) -> None:
            bench.add("c", [9, 8, 7], 2, prompt_logprobs=1)
            for request_id in ("b", "a"):
                bench.pipeline.finish(request_id, "abort")

        if not interrupted_at(line, comes_and_goes, counts=concerned):
            break
        made = bench.scheduler
        assert made.num_waiting_tokens == sum(request.num_tokens for request in made._waiting.values()), line
        for request_id in ("a", "b", "c"):
            bench.pipeline.finish(request_id, "abort")
        assert (made.has_requests, made.num_waiting_tokens, bool(made._prompt_scores)) == (False, 0, False), line
        made.check_idle()
    assert line > 6, "there are more lines"
