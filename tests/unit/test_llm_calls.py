"""Calls of an LLM that are interrupted, come at once, or lose their requests: the next one is served as ever."""

import threading
from types import CodeType
from typing import Any

import pytest
import torch

from tests.unit.inference.interrupts import interrupted_at
from tests.unit.test_llm import GREEDY, save_text_model, texts
from weft import LLM, SamplingParams, llm, output_processor, text_engine
from weft.errors import RequestError
from weft.inference import (
    block_allocator,
    draft,
    engine,
    input_processor,
    pipeline,
    prefix_cache,
    prompt_scores,
    scheduler,
)
from weft.text_engine import TextEngine

TEXT = (llm, output_processor, text_engine)
TOKENS = (engine, input_processor, block_allocator, draft, pipeline, prefix_cache, prompt_scores, scheduler)
FILES = {module.__file__ for module in (*TEXT, *TOKENS)}
PROMPTS = ["row by row", "warp", [9, 8, 7]]
STRIDE = 691


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(save_text_model(tmp_path_factory.mktemp("calls"), bos=False)), max_num_seqs=2)


@pytest.fixture(scope="module")
def params(model: LLM) -> list[SamplingParams]:
    """Several answers, one that a stop string ends, a prompt that is scored."""
    free = texts(model, "warp")[0] or ""
    return [
        SamplingParams(n=2, seed=3, max_tokens=3, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=free[2:5]),
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1),
    ]


def decides(code: CodeType) -> bool:
    return code.co_filename in FILES


# The second Ctrl-C so many lines after the call has begun to end what it has left; 0 is none.
@pytest.mark.parametrize("second", [0, 1, 28])
def test_an_interrupt_at_any_line_leaves_the_next_call_as_it_would_be(
    second: int, model: LLM, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    abort, again = TextEngine.abort, False

    def interrupted(self: TextEngine, request_id: str) -> Any:
        nonlocal again
        again, first = False, again
        if first and interrupted_at(second, lambda: abort(self, request_id), counts=decides):
            raise KeyboardInterrupt
        return abort(self, request_id)

    def said() -> list[list[tuple[str | None, list[int], object]]]:
        outputs = model.generate(PROMPTS, params, use_tqdm=False)
        return [[(answer.text, answer.token_ids, answer.finish_reason) for answer in one.outputs] for one in outputs]

    monkeypatch.setattr(TextEngine, "abort", interrupted)
    expected, line = said(), 1 + 7 * second
    assert [one[0][2] for one in expected] == ["length", "stop", "length"]
    again = second > 0
    while interrupted_at(line, said, counts=decides):
        again = False
        assert said() == expected
        model.engine._scheduler.check_idle()
        line += STRIDE  # every line in the end, as no two calls are alike
        again = second > 0
    assert line > 4 * STRIDE


def test_calls_at_once_are_served_or_refused_and_never_mixed(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find an idle engine, and are let on together."""
    expected = {prompt: texts(model, prompt)[0] for prompt in ("row", "warp")}
    barrier, found, check = threading.Barrier(2), {}, LLM._check_free

    def at_once(self: LLM, *args: Any) -> None:
        check(self, *args)
        barrier.wait(60)

    def call(prompt: str) -> None:
        try:
            found[prompt] = texts(model, prompt)[0]
        except RequestError as error:
            barrier.wait(60)
            found[prompt] = error.message

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "_check_free", at_once)
        threads = [threading.Thread(target=call, args=(prompt,), daemon=True) for prompt in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    (refused,) = (prompt for prompt, text in found.items() if text != expected[prompt])
    assert "of a call in another thread" in (found[refused] or "")
    assert {prompt: texts(model, prompt)[0] for prompt in expected} == expected


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_the_engine_has_ended_ends_its_stream(model: LLM, reason: Any) -> None:
    ends = []
    for output in model.stream("row", GREEDY):
        ends.append(output.outputs[0].finish_reason)
        model.engine.finish(f"{output.request_id}/0", reason)
        assert len(ends) < 3
    assert ends == [None, "abort"]


@pytest.mark.usefixtures("as_users_run_it")
def test_a_request_ended_from_outside_says_why(model: LLM) -> None:
    for given, said in ((None, "whoever drives the engine has ended it"), ("the disk is full", "the disk is full")):
        model.engine.add_request("a", [5], GREEDY)
        output = model.engine.finish("a", "error", error=given)
        assert output is not None
        assert (output.finish_reason, output.error) == ("error", said)
    model.engine.add_request("a", [5], GREEDY)
    reason: Any
    for reason, error in (("done", None), (None, None), (["abort"], None), ("abort", "why"), ("error", 5)):
        with pytest.raises(RequestError, match="reason="):
            model.engine.finish("a", reason, error=error)  # type: ignore[arg-type]
    output = model.engine.finish("a", "abort")
    assert output is not None
    assert (output.finish_reason, output.error) == ("abort", None)


@pytest.mark.usefixtures("as_users_run_it")
def test_a_list_of_arrays_is_a_list_of_prompts(model: LLM) -> None:
    """Each is a prompt of its own, even if it has a single token; none is a truth value, which torch counts with."""
    for prompts in ([torch.tensor([5, 6])], [torch.tensor([5]), torch.tensor([6])], [torch.tensor([5]).numpy(), [6]]):
        outputs = model.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
        assert [output.prompt_token_ids for output in outputs] == [list(prompt) for prompt in prompts]
    for prompt in (torch.tensor([[5], [6]]), [[torch.tensor([5])]], torch.tensor([True]), [[torch.tensor(True)]]):
        with pytest.raises(RequestError, match=r"prompt_token_ids\[0\] must be an integer"):
            model.generate(prompt, GREEDY, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("value", ["no", 0, 1, "", None, tuple], ids=repr)
def test_a_switch_is_true_or_false(value: Any, model: LLM) -> None:
    """ "no" would be yes, and a callable, which vLLM takes for its bar, a bar that nobody sees."""
    chat: Any = [{"role": "user", "content": "row"}]
    for name, call in (
        ("use_tqdm", lambda: model.generate([5], GREEDY, use_tqdm=value)),
        ("use_tqdm", lambda: model.chat(chat, GREEDY, use_tqdm=value)),
        ("continue_final_message", lambda: model.chat(chat, GREEDY, continue_final_message=value)),
        ("add_generation_prompt", lambda: model.stream_chat(chat, GREEDY, add_generation_prompt=value)),
    ):
        if name != "add_generation_prompt" or value is not None:
            with pytest.raises(RequestError, match=f"^{name} must be True or False, got"):
                call()
