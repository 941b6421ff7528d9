"""Conversations: the prompt is HuggingFace's, token by token, with one BOS; what is no conversation is refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.made_tokenizers import byte_level, save
from tests.unit.test_llm import GREEDY, save_text_model
from tests.unit.test_tokenizer import BOS
from weft import LLM, SamplingParams
from weft.errors import InvalidPromptsError, RequestError
from weft.tokenizer.hub import HubTokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Who weaves?\n  Row by row: 你好 😀"}
ANSWER = {"role": "assistant", "content": "The weft "}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER],
    "a special token in the text": [{"role": "user", "content": "<s>a</s>"}],
    "a role that the template names": [{"role": "critic", "content": "Too long."}, USER],
}
# Trims what it is given, as many do; alternating roles only; a role of its own.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'critic' %}[!]{% endif %}"
    "{% if message.content == 'forbidden' %}{{ raise_exception('no such thing') }}{% endif %}"
    "[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if thinking is defined %}{{ thinking }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    return HubTokenizer(save(byte_level(), tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Its tokenizer puts a BOS before every text, and so does its template."""
    return LLM(str(save_text_model(tmp_path_factory.mktemp("chat_bos"), bos=True)), max_num_seqs=2)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_generation_prompt": True, "thinking": "off"},
    ],
    ids=str,
)
def test_a_conversation_is_huggingfaces_token_by_token(
    tokenizer: HubTokenizer, name: str, options: dict[str, Any]
) -> None:
    messages = CONVERSATIONS[name]
    if "continue_final_message" in options:
        messages = [*messages, ANSWER]
    messages = [dict(message) for message in messages]  # one object twice is marked twice by transformers 5.17
    expected = tokenizer.inner.apply_chat_template(messages, return_dict=False, **options)
    assert tokenizer.encode(tokenizer.chat(messages, **options), add_special_tokens=False) == expected


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "a list of messages, got 'hello'"),
        (USER, "a list of messages"),
        (5, "a list of messages, got 5"),
        ([USER, "hello"], r"messages\[1\] must be a mapping"),
        ([{"content": "a"}], r"messages\[0\] has no role"),
        ([USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "asistant", "content": "a"}], r"messages\[0\] has the unknown role 'asistant'(.|\n)*'assistant'"),
        ([{"role": None, "content": "a"}], "unknown role None"),
        ([{"role": "", "content": "a"}], "unknown role ''"),
        ([{"role": "e", "content": "a"}], "unknown role 'e'"),
        ([{"role": "user", "content": None}], r"messages\[0\] content must be a text, got None"),
        ([{"role": "user", "content": 5}], "content must be a text, got 5"),
        ([{"role": "user", "content": b"a"}], "content must be a text, got b'a'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "parts of text(.|\n)*image_url"),
        ([{"role": "user", "content": ["a"]}], "parts of text, got 'a'"),
        ([{"role": "assistant", "content": "", "tool_calls": []}], r"messages\[0\] has tool_calls"),
        ([{"role": "user", "content": "forbidden"}], "the chat template refuses the conversation: no such thing"),
    ],
)
def test_what_is_no_conversation_is_refused_by_place(tokenizer: HubTokenizer, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer.chat(messages)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content }}", "a\nb"),  # a list as a text would show its brackets
        ("{{ '>' + messages[0].content }}", ">a\nb"),
        ("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", "ab"),
    ],
)
def test_parts_of_text_are_one_text_to_a_template_that_reads_none(
    tokenizer: HubTokenizer, template: str, text: str
) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert tokenizer.chat(messages, chat_template=template) == text
    nothing = [{"role": "user", "content": list[Any]()}]
    assert tokenizer.chat(nothing, chat_template=template) == text.rstrip("\nab")


def test_a_message_is_begun_or_continued_and_not_both(tokenizer: HubTokenizer) -> None:
    with pytest.raises(RequestError, match="leave out one"):
        tokenizer.chat([USER, ANSWER], add_generation_prompt=True, continue_final_message=True)
    assert tokenizer.chat([USER, ANSWER], continue_final_message=True).endswith("[assistant]The weft")


def test_a_tokenizer_without_a_template_says_so_and_takes_one(tmp_path: Path) -> None:
    bare = HubTokenizer(save(byte_level(), tmp_path))
    with pytest.raises(RequestError, match="no chat template") as caught:
        bare.chat([USER])
    assert "chat_template" in str(caught.value.hint)
    assert bare.chat([{"role": "user", "content": "a"}], chat_template="{{ messages[0].content }}!") == "a!"


def ids(llm: LLM, messages: Any, **options: Any) -> list[int]:
    assert llm.tokenizer is not None
    inner: PreTrainedTokenizerFast = llm.tokenizer.inner
    return inner.apply_chat_template(messages, return_dict=False, **options)


def test_a_conversation_has_one_bos_and_is_answered_as_its_tokens_are(llm: LLM) -> None:
    messages = [SYSTEM, {"role": "user", "content": "row"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == ids(llm, messages, add_generation_prompt=True)
    assert output.prompt_token_ids.count(BOS) == 1
    assert output.prompt == "<s>[system] Be brief.\n[user] row\n[assistant]"
    assert output.outputs == llm.generate([output.prompt_token_ids], GREEDY, use_tqdm=False)[0].outputs
    assert "".join(part.outputs[0].text or "" for part in llm.stream_chat(messages, GREEDY)) == output.outputs[0].text


@pytest.mark.parametrize("form", [list, tuple])
def test_several_conversations_are_answered_in_their_order(llm: LLM, form: type[Sequence[Any]]) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("row", "warp", "weft")]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 1, 2)]
    outputs = llm.chat(form(conversations), params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [
        ids(llm, conversation, add_generation_prompt=True) for conversation in conversations
    ]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 2]


def test_a_prefilled_answer_is_gone_on_with(llm: LLM) -> None:
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "The weft"}]
    options = {"continue_final_message": True, "chat_template": template}
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, **options)  # type: ignore[arg-type]
    assert output.prompt is not None
    assert output.prompt.endswith("[assistant]The weft")
    assert output.prompt_token_ids == ids(llm, messages, **options)
    (variable,) = llm.chat(
        messages,
        GREEDY,
        use_tqdm=False,
        chat_template="{{ mood }}",
        chat_template_kwargs={"mood": "calm"},
    )
    assert variable.prompt == "calm"


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "a list of messages, got 'hello'"),
        (["hello"], "a list of messages, got 'hello'"),
        ([], "at least one message"),
        ([[]], "at least one message"),
        (5, "a list of messages, got 5"),
        (None, "a list of messages, got None"),
        ([USER, [USER]], r"messages\[1\] must be a mapping"),
        ([{"role": "user", "content": "\ud800"}], "is no Unicode"),
    ],
)
def test_what_chat_is_given_is_checked(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY)
    with pytest.raises(RequestError):
        llm.stream_chat(messages, GREEDY)  # one conversation, so that a list of several is wrong in its own way
    assert not llm.engine.has_unfinished_requests()


def test_bad_conversations_are_named_by_place_and_none_is_served(llm: LLM, tmp_path: Path) -> None:
    good = [USER]
    with pytest.raises(RequestError, match=r"^prompts\[1\]: messages\[0\] has no content"):
        llm.chat([good, [{"role": "user"}]], GREEDY)
    with pytest.raises(InvalidPromptsError) as caught:
        llm.chat([good, [{"role": "user"}], [{"role": "usr", "content": ""}]], GREEDY)
    assert sorted(caught.value.errors) == [1, 2]
    with pytest.raises(RequestError, match="no tool calls yet") as refused:
        llm.chat(good, GREEDY, tools=[{"type": "function"}])
    assert refused.value.hint is not None
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": 5}, "chat_template must be a text or None, got 5"),
        ({"chat_template_kwargs": [5]}, "chat_template_kwargs must be a mapping"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs holds 5"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs holds 'messages'"),
        ({"chat_template_kwargs": {"inner": 1}}, "chat_template_kwargs holds 'inner'"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs holds 'add_gen"),
    ],
)
def test_what_a_template_is_given_is_checked(llm: LLM, options: dict[str, Any], message: str) -> None:
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError, match=f"^{message}"):
            call([USER], GREEDY, **options)  # type: ignore[arg-type]


def test_without_a_tokenizer_a_conversation_is_refused(tmp_path: Path) -> None:
    tokens_only = LLM(str(save_text_model(tmp_path, bos=False)), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match=r"a conversation needs a tokenizer"):
        tokens_only.chat([USER], GREEDY)
