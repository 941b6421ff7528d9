"""Who is called by a step and calls the engine: an observer's calls count, and a policy's are refused by name."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from weft import SamplingParams
from weft.errors import RequestError
from weft.inference.engine import Engine
from weft.inference.policies import fcfs
from weft.inference.policies.interface import SchedulerView
from weft.inference.request import Request

Build = Callable[..., Engine]

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = {"a": [7, 8, 9], "b": [40, 2], "c": [61, 33, 7]}
DRY = {"max_num_seqs": 3, "block_size": 2, "num_blocks": 8}  # of the three somebody has to give way

CALLS: dict[str, Callable[[Engine], object]] = {
    "finish('a', 'abort')": lambda engine: engine.abort("a"),
    "finish('c', 'stop')": lambda engine: engine.finish("c", "stop"),
    "add_request('z')": lambda engine: engine.add_request("z", [4, 5], GREEDY),
    "step()": lambda engine: engine.step(),
}


class Once:
    """Makes its call the first time it is reached; whether it stood there, and with what it came back."""

    def __init__(self, call: Callable[[Engine], object]) -> None:
        self.call = call
        self.engine: Engine | None = None
        self.num_reached = 0
        self.error: Exception | None = None
        self.catches = False

    def __call__(self) -> None:
        self.num_reached += 1
        if self.engine is None or self.num_reached > 1:
            return
        try:
            self.call(self.engine)
        except Exception as error:
            self.error = error
            if not self.catches:
                raise


def policy_calling(place: str, once: Once) -> type[fcfs.POLICY]:
    """First come, first served, and from this method of it, or as its candidates end, the call is made."""

    class Calling(fcfs.POLICY):
        def candidates(self, view: SchedulerView) -> Iterator[Request]:
            if place == "candidates":
                once()
            yield from super().candidates(view)
            if place == "the end of candidates":
                once()

        def admitted(self, request: Request) -> None:
            if place == "admitted":
                once()

        def victim(self, running: Sequence[Request]) -> Request:
            if place == "victim":
                once()
            return super().victim(running)

    return Calling


def said_by(engine: Engine) -> tuple[dict[str, list[int]], list[RequestError]]:
    """What each request says, and what steps raised on the way."""
    raised: list[RequestError] = []
    said: dict[str, list[int]] = {}
    for _ in range(100):
        if not engine.has_unfinished_requests():
            break
        try:
            outputs = engine.step()
        except RequestError as error:
            raised.append(error)
            continue
        for output in outputs:
            said.setdefault(output.request_id, []).extend(output.new_token_ids)
    engine._scheduler.check_idle()
    return said, raised


def start(engine: Engine) -> None:
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, GREEDY)


@pytest.fixture(scope="module")
def texts(build: Build) -> dict[str, list[int]]:
    """What each says alone, the one that is added from inside among them."""
    engine = build()
    start(engine)
    engine.add_request("z", [4, 5], GREEDY)
    return said_by(engine)[0]


@pytest.mark.parametrize(("catches", "overlap"), [(False, True), (True, False)])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", ["candidates", "the end of candidates", "admitted", "victim"])
def test_a_policy_that_calls_the_engine_is_told_which_call_and_nothing_is_lost(
    place: str,
    call: str,
    catches: bool,
    overlap: bool,
    build: Build,
    texts: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = Once(CALLS[call])
    once.catches = catches
    monkeypatch.setattr(fcfs, "POLICY", policy_calling(place, once))
    once.engine = engine = build(policy="fcfs", overlap=overlap, **DRY)
    start(engine)
    said, raised = said_by(engine)
    assert once.num_reached, "nobody called"
    assert isinstance(once.error, RequestError), once.error
    assert call in once.error.message
    assert "between two steps" in str(once.error.hint)
    assert raised == ([] if catches else [once.error])
    assert said == {name: texts[name] for name in PROMPTS}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_observer_may_end_and_add_requests_and_take_no_step(
    call: str, overlap: bool, build: Build, texts: dict[str, list[int]]
) -> None:
    once = Once(CALLS[call])
    engine = build(observe=lambda plan, logits: once(), overlap=overlap, **DRY)
    once.engine = engine
    start(engine)
    said, raised = said_by(engine)
    gone = {"finish('a', 'abort')": "a", "finish('c', 'stop')": "c"}.get(call)
    expected = {name: tokens for name, tokens in texts.items() if name != gone}
    if call != "add_request('z')":
        del expected["z"]
    assert said == expected
    assert raised == ([] if once.error is None else [once.error])
    assert (once.error is not None) == (call == "step()")
    if once.error is not None:
        assert isinstance(once.error, RequestError)
        assert call in once.error.message


def test_what_is_refused_inside_a_step_has_no_part_in_the_seeds_of_who_comes_after(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)

    def drawn(call: Callable[[Engine], object]) -> list[int]:
        once = Once(call)
        once.catches = True
        monkeypatch.setattr(fcfs, "POLICY", policy_calling("candidates", once))
        once.engine = engine = build(policy="fcfs")
        engine.add_request("a", [7, 8, 9], GREEDY)
        said_by(engine)
        engine.add_request("drawn", [3], params)
        return said_by(engine)[0]["drawn"]

    assert drawn(lambda engine: engine.add_request("z", [4, 5], params)) == drawn(lambda engine: None)


def test_a_second_interrupt_ahead_of_all_that_the_first_leads_to_leaves_no_step_under_way(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python lets one in where a call begins. Nobody would be called by the step any more, and every call refused."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for place in ("_scheduler.schedule", "_runner.execute"):
        engine = build()
        start(engine)
        with monkeypatch.context() as patch:
            patch.setattr("weft.inference.pipeline.Pipeline._restart", interrupted)
            owner, name = place.split(".")
            patch.setattr(getattr(engine._pipeline, owner), name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        for request_id in PROMPTS:
            assert engine.abort(request_id) is not None
        assert engine.step() == []
