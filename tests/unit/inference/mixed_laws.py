"""Requests of every kind in one engine, each compared with what it says alone: laws that a fault between them breaks.

How a step reaches the device, who had a row before, who gave way in between and whose seed it was must not be heard.
Each law takes weft's modules, with or without a fault, and the kinds that it is to mix.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, product
from typing import Any

from tests.unit.inference.mixed_bench import Bench, Modules, solo
from weft.inference.plan import StepPlan
from weft.inference.sampling_params import SamplingParams

STOP = 11
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
WARM: dict[str, Any] = PLAIN | {"temperature": 4.0}  # enough for another seed to say something else
SCORED: dict[str, Any] = {"logprobs": 2}
STOPPED: dict[str, Any] = PLAIN | {"stop_token_ids": [STOP], "logit_bias": {STOP: 100}}
# What each kind asks for, and the same without it, which says something else.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed": (WARM | {"seed": 2**63 + 5}, WARM | {"seed": 5}),
    "temperature": (WARM | {"seed": 6}, PLAIN),
    "top_k": (WARM | {"seed": 7, "top_k": 2}, WARM | {"seed": 7}),
    "top_p": (WARM | {"seed": 8, "top_p": 0.2}, WARM | {"seed": 8}),
    "min_p": (WARM | {"seed": 9, "min_p": 0.7}, WARM | {"seed": 9}),
    "allowed": (PLAIN | {"allowed_token_ids": [*range(12, 24)]}, PLAIN),
    "words": (PLAIN | {"bad_words": [[token] for token in range(0, 24, 2)]}, PLAIN),
    "held back": (STOPPED | {"min_tokens": 5}, STOPPED),
    "bias": (PLAIN | {"logit_bias": {1: 5, 2: 5, 9: 6}}, PLAIN),
    "repetition": (PLAIN | {"repetition_penalty": 3.0}, PLAIN),
    "frequency": (PLAIN | {"frequency_penalty": -1.5}, PLAIN),
    "presence": (PLAIN | {"presence_penalty": 2.0}, PLAIN),
}
TRUNCATED = ("top_k", "top_p", "min_p")
Kinds = Sequence[str]


@lru_cache(maxsize=64)
def prompts_of(kind: str, count: int) -> list[tuple[int, ...]]:
    """Prompts after which this kind makes a difference, and a late one: whoever forgets it half way shows it."""
    asked, without = (SamplingParams(**fields) for fields in KINDS[kind])

    def differs(prompt: tuple[int, ...]) -> bool:
        said, other = (solo(prompt, params, "raw_logprobs")[0].token_ids for params in (asked, without))
        return sum(one != another for one, another in zip(said, other, strict=False)) > 2 or len(said) != len(other)

    found = list(islice(filter(differs, ((6, 7, 6, 7, token) for token in range(24))), count))
    assert len(found) == count, f"{kind} changes nothing"
    return found


def add_all(bench: Bench, kinds: Kinds, **more: Any) -> None:
    """Every kind beside requests of none, with a long prompt ahead."""
    bench.add("long", [6, 7] * 5, SamplingParams(**PLAIN | {"max_tokens": 1}))
    for kind in kinds:
        (prompt,), (asked, without) = prompts_of(kind, 1), KINDS[kind]
        for name, fields in (("with", asked), ("without", without | {"max_tokens": 5})):
            bench.add(f"{kind} {name}", prompt, SamplingParams(**fields | more))


def every_step_samples_what_was_asked_for(modules: Modules, kinds: Kinds) -> None:
    """Programs and graphs beside the plain path, chunks beside those who speak."""
    for way, overlap in (("plain", False), ("launched", True), ("graphs", True)):
        options = {"max_num_seqs": 5, "max_num_batched_tokens": 9, "max_chunk_tokens": 2}
        bench = Bench(modules, way, overlap=overlap, enable_prefix_caching=False, **options)
        add_all(bench, kinds)
        bench.add("long again", [7, 6] * 5, SamplingParams(**PLAIN))
        bench.run()
        mixed = [plan for plan in bench.plans if 0 < sum(plan.num_logit_rows) < len(plan.rows)]
        assert mixed, "no chunk beside a request that speaks"
        assert set(bench.runner.num_steps) == {{"graphs": "graph"}.get(way, way)}


def a_request_is_scored_by_its_own_logits(modules: Modules, kinds: Kinds) -> None:
    for way, mode in product(("plain", "graphs"), ("raw_logprobs", "processed_logprobs")):
        bench = Bench(modules, way, overlap=True, max_num_seqs=5, max_chunk_tokens=2, logprobs_mode=mode)
        add_all(bench, kinds, **SCORED)
        bench.run()


def a_step_truncates_if_somebody_in_it_asks_for_it(modules: Modules, kinds: Kinds) -> None:
    """Graphs of decodes: the one without truncation where nobody has any, the one with it where anybody has."""
    for kind in set(kinds) & set(TRUNCATED):
        bench = Bench(modules, "graphs", max_num_seqs=3, graph_batch_sizes=(1, 3))
        asked, without = KINDS[kind]
        of_kinds = {"with": asked | {"max_tokens": 3}, "greedy": asked | {"temperature": 0}, "without": without}
        for place, prompt in enumerate(prompts_of(kind, 2)):
            for name, fields in reversed(of_kinds.items()) if place else of_kinds.items():
                bench.add(f"{name} {place}", prompt, SamplingParams(**fields))
        bench.run()
        names = {f"with {place}" for place in range(2)}
        found = [(is_decode(plan), bool(truncates(plan, names))) for plan in bench.plans]
        assert {(True, True), (True, False)} <= set(found)
        sizes = bench.runner._graphs.replayed
        assert [size.truncates for size in sizes] == [truncated or not decode for decode, truncated in found]


def is_decode(plan: StepPlan) -> bool:
    return set(plan.num_new_tokens) == {1} and all(plan.num_logit_rows)


def truncates(plan: StepPlan, names: set[str]) -> bool:
    return any(request_id.removesuffix("/0") in names for request_id in plan.request_ids)


def whoever_takes_a_row_finds_nothing_of_its_last_owner(modules: Modules, kinds: Kinds) -> None:
    """One row or two, which go from a kind to none, to the next kind and back, from some before they have ended."""
    for way, num_rows in (("plain", 1), ("graphs", 2)):
        bench = Bench(modules, way, overlap=way == "graphs", max_num_seqs=num_rows)
        add_all(bench, kinds)
        for place, kind in enumerate((*kinds, *reversed(kinds))):
            bench.add(f"again {place}", *prompts_of(kind, 1), SamplingParams(**KINDS[kind][0] | {"max_tokens": 6}))
        while bench.asked:
            bench.step()
            for name in [name for name, asked in bench.asked.items() if asked.answers[0].token_ids]:
                if name.startswith("again") and name[-1] in "02468":
                    bench.abort(name)
        bench.run()


def whoever_gives_way_goes_on_as_if_it_had_not(modules: Modules, kinds: Kinds) -> None:
    """Each kind gives way after each of its tokens but the last, and comes back with what it has said."""
    for kind in kinds:
        bench = Bench(modules, max_num_seqs=2)
        scheduler, gave_way = bench.engine._scheduler, 0
        (prompt,) = prompts_of(kind, 1)
        bench.add("stays", (2, 3), SamplingParams(**PLAIN | {"max_tokens": 12}))
        bench.step()
        bench.add("gives way", prompt, SamplingParams(**KINDS[kind][0]))
        while "gives way" in bench.asked:
            bench.step()
            if "gives way" in bench.asked:
                assert scheduler._preempt().request_id == "gives way/0"
                gave_way += 1
        bench.run()
        assert gave_way > 4


def want_of_blocks_is_not_heard(modules: Modules, kinds: Kinds) -> None:
    for way in ("plain", "graphs"):
        bench = Bench(modules, way, overlap=True, max_num_seqs=5, num_blocks=6, block_size=3)
        add_all(bench, kinds, **SCORED)
        bench.run()
        assert any(plan.preempted_ids for plan in bench.plans)


def each_request_draws_by_its_own_seed(modules: Modules, kinds: Kinds) -> None:
    for way in ("plain", "graphs"):
        bench = Bench(modules, way, max_num_seqs=6)
        for place, seed in enumerate((None, None, 5, 2**63 + 5, 2**64 - 1, None)):
            bench.add(str(place), (6, 7), SamplingParams(**WARM | {"seed": seed, "n": 2}))
        while bench.asked:
            bench.step()
        assert len(set(bench.seeds.values())) == len(bench.seeds) == 12
        bench.run()
