"""A step on the device alone, in Triton's interpreter: what it takes from the host, and when its tokens are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import CodeType
from typing import Any

import pytest
import torch

from tests.unit.inference.interrupts import interrupted_at
from weft.inference.engine import Engine
from weft.inference.plan import StepPlan
from weft.inference.runner import StepHandle
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_program import LOG_ENTRIES
from weft.inference.step_sizes import StepSize
from weft.kernels._jit import runs_on

Build = Callable[..., Engine]

pytestmark = pytest.mark.skipif(
    not runs_on(torch.device("cpu")), reason="Triton is Linux-only, and kernels run on CUDA"
)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def launches(code: CodeType) -> bool:
    """Whether these lines launch a step."""
    return code.co_name in ("_run_program", "_mark") and code.co_filename.endswith("runner.py")


@pytest.fixture
def engine(build: Build) -> Engine:
    return build(
        device="cpu", operations="fused", attention_backend="paged_triton", max_num_seqs=3, max_num_batched_tokens=8
    )


def executed(engine: Engine) -> tuple[list[StepPlan], list[StepHandle]]:
    """Every plan and handle from now on."""
    runner: Any = engine._runner
    plans, handles, execute = [], [], runner.execute

    def noted(plan: StepPlan) -> StepHandle:
        plans.append(plan)
        handles.append(execute(plan))
        return handles[-1]

    runner.execute = noted
    return plans, handles


def test_a_steady_step_takes_nothing_from_the_host(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        engine.add_request(name, [3, 4], GREEDY)
    engine.step()
    engine.step()
    made: list[Any] = []
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *given, **options: made.append(given) or tensor(*given, **options))
    engine.step()
    assert made == []
    engine.finish("a", "abort")
    engine.step()
    assert len(made) == 1  # who takes part


def test_tokens_can_be_read_a_step_late_and_never_when_overwritten(engine: Engine) -> None:
    _, handles = executed(engine)
    engine.add_request("a", [3, 4], GREEDY)
    said = [output.new_token_ids for _ in range(LOG_ENTRIES + 1) for output in engine.step()]
    assert [tuple(handle.tokens()[0]) for handle in handles[1:]] == said[1:]
    with pytest.raises(AssertionError, match="overwritten unread"):
        handles[0].tokens()


def test_a_chunk_of_one_token_is_no_decode(build: Build) -> None:
    """Its sampled token is nobody's: it must not take the place of the prompt's next one."""
    options = {"device": "cpu", "max_num_seqs": 2, "max_chunk_tokens": 1}
    engine = build(operations="fused", attention_backend="paged_triton", **options)
    runner: Any = engine._runner
    sizes: list[StepSize] = []
    run = runner._program.run
    runner._program.run = lambda size: (sizes.append(size), run(size))
    engine.add_request("a", [3, 4, 7], GREEDY)
    said = [token for _ in range(5) for output in engine.step() for token in output.new_token_ids]
    assert sizes == [StepSize(2, 1)] * 2 + [StepSize(1, 1)] * 3
    plain = build(operations="plain", **options)
    plain.add_request("a", [3, 4, 7], GREEDY)
    assert said == [token for _ in range(5) for output in plain.step() for token in output.new_token_ids]


def test_a_step_that_is_sampled_again_leaves_the_prompts_beside_it_alone(build: Build) -> None:
    """Only a row with processors asks for it, and what a chunk samples is nobody's then either."""
    said = []
    for operations, backend in (("fused", "paged_triton"), ("plain", "auto")):
        engine = build(
            device="cpu", operations=operations, attention_backend=backend, max_num_seqs=2, max_chunk_tokens=1
        )
        tokens: dict[str, list[int]] = {"processed": [], "chunked": []}
        engine.add_request("processed", [5], replace(GREEDY, max_tokens=8, repetition_penalty=1.5))
        engine.add_request("chunked", [3, 4, 7, 9], replace(GREEDY, max_tokens=3))
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] += output.new_token_ids
        said.append(tokens)
    assert said[0] == said[1]


def test_a_step_that_fails_half_way_leaves_the_count_of_steps_right(engine: Engine, build: Build) -> None:
    runner: Any = engine._runner
    forward = runner._model.forward
    failures = iter([MemoryError("no room")])

    def fails_once(*given: Any) -> Any:
        for failure in failures:
            raise failure
        return forward(*given)

    runner._model.forward = fails_once
    engine.add_request("a", [3, 4, 5], GREEDY)
    with pytest.raises(MemoryError):
        engine.step()
    said = [token for _ in range(6) for output in engine.step() for token in output.new_token_ids]
    plain = build(device="cpu", operations="plain")
    plain.add_request("a", [3, 4, 5], GREEDY)
    assert said == [token for _ in range(6) for output in plain.step() for token in output.new_token_ids]


def test_wherever_a_step_is_interrupted_the_next_ones_read_their_own_tokens(engine: Engine) -> None:
    """At every line of it in turn. The program stands still: it says which step of the device's it is."""
    runner: Any = engine._runner
    steps = runner._state.num_steps

    def run(size: StepSize) -> None:
        steps.add_(1)
        runner._program.token_log[int(steps) % LOG_ENTRIES] = int(steps) % 90

    runner._program.run = run
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for place in count(1):
        engine.add_request("a", [3, 4], params)
        engine.step()
        if not interrupted_at(place, engine.step, counts=launches):
            break
        while engine.has_unfinished_requests():
            assert [output.new_token_ids for output in engine.step()] == [(int(steps) % 90,)]
    assert place > 12


def test_a_step_is_launched_on_the_device_of_its_state(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device the calling thread uses: a launch with pointers into another GPU is an illegal access."""

    class Entered(Exception):  # noqa: N818  # no error: it ends the step
        pass

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    def apply(plan: StepPlan) -> None:
        raise Entered(*inside)

    inside: list[torch.device] = []
    runner: Any = engine._runner
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(runner._state, "apply", apply)
    monkeypatch.setattr(runner, "_device", torch.device("cuda:1"))
    engine.add_request("a", [3, 4], GREEDY)
    with pytest.raises(Entered) as entered:
        engine.step()
    assert entered.value.args == (torch.device("cuda:1"),)


def test_a_chunk_ahead_of_a_decode_gives_neither_token_nor_logits(build: Build) -> None:
    """The first request of the step stops short of its prompt's end; tokens and logits are the second's."""
    found = []
    for operations, backend in (("fused", "paged_triton"), ("plain", "paged_gather")):
        seen: list[torch.Tensor] = []
        engine = build(
            observe=lambda _, logits, seen=seen: seen.append(logits.clone()),
            operations=operations,
            attention_backend=backend,
            max_chunk_tokens=3,
        )
        engine.add_request("a", [3, 4, 5, 6], GREEDY)
        engine.add_request("b", [7], GREEDY)
        found.append(([(output.request_id, output.new_token_ids) for output in engine.step()], seen))
    (said, logits), (plainly_said, plain_logits) = found
    assert said == plainly_said
    assert [name for name, _ in said] == ["b"]
    assert (logits[0] - plain_logits[0]).abs().max() < 1e-4 * plain_logits[0].abs().max()  # another row differs by 1
