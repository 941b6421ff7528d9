"""What goes wrong with logprobs between the device and the caller, planted: each has a law that fails with it.

Each request is compared with what it is told alone: as many logprobs as tokens, those of the prompt once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest

from tests.unit.inference.toy_bench import Bench, Fault, fault, planted
from weft.testing.toy import sequential

X, Y, Z = [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12, 13], [21, 22, 23, 24, 25, 26]


def bench_of(module: ModuleType, num_blocks: int = 30, block_size: int = 2, **options: object) -> Bench:
    return Bench(module, num_blocks=num_blocks, block_size=block_size, **options)  # type: ignore[arg-type]


def prompts_are_scored_in_any_chunks(module: ModuleType) -> None:
    for chunk, overlap in product((None, *range(1, 10)), (False, True)):
        bench = bench_of(module, chunk=chunk, overlap=overlap)
        bench.add("a", X, 3, prompt_logprobs=2)
        bench.add("b", Y, 4, logprobs=1)
        bench.add("c", [5], 4, prompt_logprobs=0, logprobs=0)
        bench.add("d", X, 1, prompt_logprobs=-1)
        bench.run()


def a_prompt_is_scored_once_however_often_it_is_computed(module: ModuleType) -> None:
    """Whoever gives way does so in the middle of its prompt, between prompt and first token, and later."""
    gave_way = 0
    for steps in range(8):
        bench = bench_of(module, chunk=3)
        bench.add("b", Y, 12)
        bench.step()
        bench.add("a", X, 3, prompt_logprobs=1, logprobs=2)
        for _ in range(steps):
            bench.step()
        if "a" in bench.scheduler._running:
            assert bench.scheduler._preempt() is bench.requests["a"]
            gave_way += 1
        bench.scheduler._config = replace(bench.scheduler._config, max_chunk_tokens=5)  # borders lie elsewhere
        bench.run()
    assert gave_way == 4, "after each chunk, and after each token but the last"


def preemption_for_want_of_blocks_changes_no_scores(module: ModuleType) -> None:
    gave_way = 0
    for num_blocks, overlap in product(range(6, 16), (False, True)):
        bench = bench_of(module, num_blocks=num_blocks, chunk=3, overlap=overlap)
        for name, prompt in (("a", Z), ("b", Z[::-1]), ("c", X[:5])):
            bench.add(name, prompt, 6, prompt_logprobs=1, logprobs=1)
        bench.run()
        gave_way += len(bench.preempted)
    assert gave_way > 10


def whoever_wants_scores_computes_its_prompt_and_shares_it(module: ModuleType) -> None:
    for overlap in (False, True):
        bench = bench_of(module, overlap=overlap)
        for name, options in (("first", {}), ("scored", {"prompt_logprobs": 1}), ("logprobs", {"logprobs": 1})):
            bench.add(name, X, 2, **options)
            bench.run()
        assert bench.computed == {"first": len(X) + 1, "scored": len(X) + 1, "logprobs": 2}
        bench = bench_of(module, overlap=overlap)
        bench.add("scored", X, 2, prompt_logprobs=1)
        bench.run()
        bench.add("later", X, 2)
        bench.run()
        assert bench.computed["later"] == 2, "what a scored request computed is found by others"


def a_policy_is_told_what_will_be_found(module: ModuleType) -> None:
    bench = bench_of(module)
    bench.add("first", X, 2)
    bench.run()
    bench.add("scored", X, 2, prompt_logprobs=0)
    bench.add("plain", X, 2)
    found = {name: bench.scheduler.num_cached_tokens(bench.requests[name]) for name in ("scored", "plain")}
    assert found == {"scored": 0, "plain": 8}
    bench.run()


def stops_at(prompt: Sequence[int], place: int) -> frozenset[int]:
    said = sequential(prompt, place + 1)
    assert said[-1] not in said[:-1]
    return frozenset({said[-1]})


def dropped_tokens_take_their_logprobs_with_them(module: ModuleType) -> None:
    """Some stop while a step is under way, and are no longer at their place when it is read; one fails."""

    def failing(token_ids: Sequence[int]) -> bool:
        return list(token_ids) == [*Y, *sequential(Y, 2)]

    for overlap in (False, True):
        bench = bench_of(module, fails=failing, overlap=overlap)
        bench.add("a", X, 9, stops_at(X, 1), logprobs=1)
        bench.add("b", Y, 9, logprobs=2)
        bench.expected["b"] = sequential(Y, 2)
        bench.add("c", Z, 9, logprobs=3, prompt_logprobs=3)
        bench.run()


def whoever_ends_with_its_first_token_is_given_its_prompt(module: ModuleType) -> None:
    for chunk, overlap in product((None, len(X) - 1), (False, True)):
        bench = bench_of(module, chunk=chunk, overlap=overlap)
        bench.add("a", X, 1, prompt_logprobs=0)
        bench.run()


def whatever_raises_prompts_are_scored_once(module: ModuleType) -> None:
    for place, overlap in product(range(1, 9), (False, True)):
        for owner, name in (("executor", "launch"), ("scheduler", "_launch"), ("scheduler", "update")):
            bench = bench_of(module, chunk=3, overlap=overlap)
            bench.add("a", X, 4, prompt_logprobs=1, logprobs=1)
            bench.add("b", Y, 5, logprobs=2)
            part = getattr(bench, owner)
            setattr(part, name, raising_once(getattr(part, name), place))
            for _ in range(40):
                try:
                    bench.step()
                except MemoryError:
                    assert not bench.scheduler.running
            bench.run()


def raising_once(function: Callable[..., object], at: int) -> Callable[..., object]:
    left = at

    def call(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError
        return function(*arguments)

    return call


def nobody_is_owed_anything_after_its_end(module: ModuleType) -> None:
    for steps, overlap in product(range(4), (False, True)):
        bench = bench_of(module, chunk=3, overlap=overlap)
        bench.add("a", X, 5, prompt_logprobs=1)
        bench.add("b", Y, 5)
        for _ in range(steps):
            bench.step()
        bench.scheduler.finish("a", "abort")
        bench.expected["a"] = bench.said["a"]
        bench.run()
        assert not bench.scheduler._prompt_scores


def whoever_asks_for_nothing_is_told_nothing(module: ModuleType) -> None:
    bench = bench_of(module)
    bench.add("a", X, 3)
    bench.add("b", Y, 3, logprobs=1)
    bench.run()
    assert not any(plan.prompt_rows for plan in bench.plans)
    assert not bench.logprobs["a"]


FAULTS = [
    fault(
        "a chunk's border loses a token",
        prompts_are_scored_in_any_chunks,
        ("prompt_scores", "min(start + count, request.num", "min(start + count - (count > 1), request.num"),
    ),
    fault(
        "the last token of the prompt is not scored",
        prompts_are_scored_in_any_chunks,
        ("prompt_scores", "request.num_prompt_tokens - 1)  #", "request.num_prompt_tokens - 2)  #"),
    ),
    fault(
        "each token is scored in the place of the one before",
        prompts_are_scored_in_any_chunks,
        ("prompt_scores", "request.token_ids[scored + 1 : end + 1]", "request.token_ids[scored:end]"),
    ),
    fault(
        "each token is scored after itself",
        prompts_are_scored_in_any_chunks,
        ("prompt_scores", "PromptRows(column, scored - start,", "PromptRows(column, scored - start + 1,"),
    ),
    fault(
        "the prompt begins with its second token",
        prompts_are_scored_in_any_chunks,
        ("prompt_scores", "return (None, *scores)", "return tuple(scores)"),
    ),
    fault(
        "a prompt's logprobs come with every token",
        prompts_are_scored_in_any_chunks,
        (
            "prompt_scores",
            "        request.prompt_logprobs = None\n        self._owed.discard(request)\n",
            "",
        ),
    ),
    fault(
        "a prompt computed again is scored again",
        a_prompt_is_scored_once_however_often_it_is_computed,
        (
            "scheduler",
            "request.num_computed_tokens = request.num_published_blocks = 0",
            "request.num_computed_tokens = request.num_published_blocks = request.num_scored_tokens = 0",
        ),
    ),
    fault(
        "a prompt computed again is scored from its beginning",
        a_prompt_is_scored_once_however_often_it_is_computed,
        ("prompt_scores", "PromptRows(column, scored - start,", "PromptRows(column, 0,"),
    ),
    fault(
        "whoever gave way loses what was scored meanwhile",
        preemption_for_want_of_blocks_changes_no_scores,
        ("prompt_scores", "if not request.has_ended:\n", "if request.row is not None or request.has_ended:\n"),
    ),
    fault(
        "tokens found in the cache go unscored",
        whoever_wants_scores_computes_its_prompt_and_shares_it,
        ("scheduler", "if not self._caches_prefixes or request.needs_scores:", "if not self._caches_prefixes:"),
    ),
    fault(
        "whoever wants scores keeps its blocks to itself",
        whoever_wants_scores_computes_its_prompt_and_shares_it,
        (
            "scheduler",
            "if size is not None and end // size",
            "if size is not None and request.params.prompt_logprobs is None and end // size",
        ),
    ),
    fault(
        "a policy counts on blocks that are not taken",
        a_policy_is_told_what_will_be_found,
        (
            "scheduler",
            "        return len(self._hits(request)) *",
            "        return len(self._prefixes.lookup(request.token_ids, request.cache_salt)) *",
        ),
    ),
    fault(
        "a dropped token keeps its logprob",
        dropped_tokens_take_their_logprobs_with_them,
        ("prompt_scores", "logprobs=sampled[:count]", "logprobs=sampled"),
    ),
    fault(
        "logprobs go to whoever stands at that place among those that are left",
        dropped_tokens_take_their_logprobs_with_them,
        ("prompt_scores", "columns[output.request_id], len", "outputs.index(output), len"),
    ),
    fault(
        "whoever ends at once is not given its prompt",
        whoever_ends_with_its_first_token_is_given_its_prompt,
        ("scheduler", "logprobs is not None or bool(self._prompt_scores)", "logprobs is not None"),
    ),
    fault(
        "after a restart what nobody read counts as scored",
        whatever_raises_prompts_are_scored_once,
        ("prompt_scores", "    request.num_scored_tokens = len(request.prompt_logprobs)\n", "    pass\n"),
    ),
    fault(
        "a restart begins anew beside what was read",
        whatever_raises_prompts_are_scored_once,
        ("prompt_scores", "request.num_scored_tokens = len(request.prompt_logprobs)", "request.num_scored_tokens = 0"),
    ),
    fault(
        "who has ended is remembered for ever",
        nobody_is_owed_anything_after_its_end,
        ("scheduler", "        self._prompt_scores.forget(request)\n", ""),
    ),
    fault(
        "every prompt is scored",
        whoever_asks_for_nothing_is_told_nothing,
        ("prompt_scores", "is not None:\n            self._owed.add", "or True:\n            self._owed.add"),
        ("prompt_scores", "= len(request.prompt_logprobs)", "= len(request.prompt_logprobs or ())"),
        ("prompt_scores", "if request.needs_scores and scored < end", "if scored < end"),
        ("prompt_scores", 'cast("int", request.params.prompt_logprobs)', "0"),
    ),
]
LAWS = sorted({fault.law.__name__: fault.law for fault in FAULTS}.items())


@pytest.mark.parametrize(("name", "law"), LAWS, ids=[name for name, _ in LAWS])
def test_the_law_holds(name: str, law: Callable[[ModuleType], None]) -> None:
    with planted(()) as module:
        law(module)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.report)
def test_the_law_fails_with_the_fault(fault: Fault) -> None:
    with planted(fault.edits) as module, pytest.raises((AssertionError, KeyError, IndexError)):
        fault.law(module)
