"""Talking in the terminal: answers as they come, turns that remember, and messages a line each from a pipe."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_llm import save_text_model
from weft import LLM, SamplingParams
from weft.cli import main

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SYSTEM = {"role": "system", "content": "brief"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_text_model(tmp_path_factory.mktemp("chat_command"), bos=False))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model)


Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def talk(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    def call(lines: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        options = ["--max-tokens", "4", "--ignore-eos", "--temperature", "0", "--device", "cpu", "--model", model]
        status = main(["chat", *options, *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def answer(llm: LLM, *messages: dict[str, str]) -> str:
    return llm.chat(messages, PARAMS, use_tqdm=False)[0].outputs[0].text or ""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_line_from_a_pipe_is_a_turn_and_each_turn_remembers(llm: LLM, talk: Talk) -> None:
    first = answer(llm, SYSTEM, user("a"))
    second = answer(llm, SYSTEM, user("a"), assistant(first), user("b"))
    assert answer(llm, SYSTEM, user("b")) != second
    assert talk("a\n\n  b \n", "--system", "brief")[:2] == (0, f"{first}\n{second}\n")


def test_reset_forgets_the_turns_and_keeps_what_the_system_says(llm: LLM, talk: Talk) -> None:
    first, again = answer(llm, SYSTEM, user("a")), answer(llm, SYSTEM, user("b"))
    assert talk("a\n/reset\nb\n/exit\nc\n", "--system", "brief")[:2] == (0, f"{first}\n{again}\n")


def test_json_is_one_object_a_turn(llm: LLM, talk: Talk) -> None:
    status, out, _ = talk("a\n", "--json", "--stop", "never said")
    (row,) = [json.loads(line) for line in out.splitlines()]
    (expected,) = llm.chat([user("a")], PARAMS, use_tqdm=False)
    assert status == 0
    assert row == {
        "role": "assistant",
        "content": expected.outputs[0].text,
        "token_ids": expected.outputs[0].token_ids,
        "finish_reason": "length",
        "stop_reason": None,
        "error": None,
    }


def test_a_message_that_cannot_be_answered_is_said_and_the_conversation_goes_on(llm: LLM, talk: Talk) -> None:
    status, out, err = talk("a" * 99 + "\n/rset\nb\n")
    assert (status, out) == (1, answer(llm, user("b")) + "\n")
    assert "leaves no room for a new one" in err
    assert "weft: unknown command '/rset'\nhint: did you mean '/reset'?" in err


def test_a_slash_within_a_sentence_is_no_command(llm: LLM, talk: Talk) -> None:
    assert talk("/a b\n")[:2] == (0, answer(llm, user("/a b")) + "\n")


@pytest.mark.parametrize(("arguments", "status"), [(["chat"], 1), (["generate", "-"], 2)], ids=["chat", "generate"])
def test_bytes_that_are_no_text_are_refused_by_place(
    arguments: list[str],
    status: int,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8"))
    assert main([*arguments, "--model", model, "--device", "cpu"]) == status
    assert "is no Unicode" in capsys.readouterr().err


def test_an_interrupt_ends_the_answer_of_who_types_and_the_command_in_a_pipe(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.chat_command import PICTURES, Chat

    plain, calls = llm.stream_chat, iter(range(9))

    def interrupted(messages: Any, params: Any) -> Iterator[Any]:
        for output in plain(messages, params):
            yield output
            if next(calls) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream_chat", interrupted)
    chat = Chat(llm, PARAMS, None, as_json=False, interactive=True)
    assert chat.run(["a", "b"])
    assert not llm.engine.has_unfinished_requests()
    said = [message["content"] for message in chat._messages]
    assert said[::2] == ["a", "b"]
    monkeypatch.setattr(llm, "stream_chat", plain)
    cut = said[1]
    assert answer(llm, user("a")).startswith(cut)
    assert len(cut) < len(answer(llm, user("a")))
    assert said[3] == answer(llm, user("a"), assistant(cut), user("b"))
    assert capsys.readouterr().out == f"{cut}\n{said[3]}\n".translate(PICTURES)
    calls = iter(range(9))
    monkeypatch.setattr(llm, "stream_chat", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Chat(llm, PARAMS, None, as_json=False, interactive=False).run(["a", "b"])
    assert not llm.engine.has_unfinished_requests()


def test_what_the_models_authors_set_holds_unless_it_is_asked_for(
    model: str, talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []

    def noted(self: LLM, messages: Any, params: SamplingParams) -> Iterator[Any]:
        seen.append(params)
        return iter(())

    monkeypatch.setattr(
        LLM, "default_sampling_params", lambda self: SamplingParams(temperature=0.6, top_p=0.9, stop="z")
    )
    monkeypatch.setattr(LLM, "stream_chat", lambda *args: (output for output in noted(*args)))
    talk("a\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    main(["chat", "--model", model, "--device", "cpu", "--top-p", "0.5"])
    assert seen == [
        SamplingParams(temperature=0, top_p=0.9, stop="z", max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.6, top_p=0.5, stop="z", max_tokens=512),
    ]
