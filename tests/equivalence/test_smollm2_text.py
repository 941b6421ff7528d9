"""SmolLM2's own tokenizer: streamed text is the text decoded at once, and a conversation is HuggingFace's tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.detokenizing import check, pieces, token_ids
from weft.tokenizer.hub import HubTokenizer

_TEXT = "Row by row, Schuß für Schuß, строка за строкой, 一行一行, पंक्ति, שורה 👩\u200d🚀🇫🇷 – done.\n    if x:\n\t…"


@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_the_text_decoded_at_once(
    smollm2_tokenizer: HubTokenizer, data: st.DataObject, skip: bool
) -> None:
    prompt, answer = (data.draw(token_ids(smollm2_tokenizer)) for _ in range(2))
    check(smollm2_tokenizer, prompt, answer, skip=skip)


def test_a_prompt_may_end_anywhere(smollm2_tokenizer: HubTokenizer) -> None:
    ids = smollm2_tokenizer.encode(_TEXT)
    for place in range(len(ids)):
        check(smollm2_tokenizer, ids[:place], ids[place:], skip=True)
    assert not any("\ufffd" in piece for piece in pieces(smollm2_tokenizer, [], ids))


_USER = {"role": "user", "content": "Who weaves? 你好 😀"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_ASSISTANT = {"role": "assistant", "content": "The weft"}


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([_USER], {"add_generation_prompt": True}),
        ([_SYSTEM, _USER], {"add_generation_prompt": True}),
        ([_SYSTEM, _USER, _ASSISTANT, _USER], {"add_generation_prompt": True}),
        ([_USER, _ASSISTANT], {"continue_final_message": True}),
    ],
    ids=["user", "system", "several turns", "prefilled"],
)
def test_a_conversation_is_huggingfaces_token_by_token(
    smollm2_tokenizer: HubTokenizer, messages: list[dict[str, str]], options: dict[str, bool]
) -> None:
    expected = smollm2_tokenizer.inner.apply_chat_template(messages, return_dict=False, **options)
    text = smollm2_tokenizer.chat(messages, **options)
    assert smollm2_tokenizer.encode(text, add_special_tokens=False) == expected
