"""Tokens to text, one at a time: the pieces joined are the text decoded at once, whatever the decoder does."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.detokenizing import TEXTS, byte_tokens, check, check_open_windows, pieces, token_ids, whole
from tests.unit.made_tokenizers import MADE, byte_level_of_gguf, made, save
from weft.tokenizer.detokenizer import detokenizer
from weft.tokenizer.hub import HubTokenizer

_KNOWING = ["byte level", "byte fallback"]  # those whose bytes are known


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HubTokenizer]:
    return {name: made(name, tmp_path_factory.mktemp("made")) for name in MADE}


@pytest.fixture(params=_KNOWING)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, HubTokenizer]) -> HubTokenizer:
    return tokenizers[request.param]


def spell(tokenizer: HubTokenizer, text: bytes) -> list[int]:
    tokens = byte_tokens(tokenizer)
    return [tokens[byte] for byte in text]


def words(tokenizer: HubTokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.inner(text, add_special_tokens=False)["input_ids"]
    return ids


def test_each_way_to_decode_is_recognised(tokenizers: dict[str, HubTokenizer]) -> None:
    found = {name: tokenizer.pieces.decoding for name, tokenizer in tokenizers.items()}
    assert found == {
        "byte level": "bytes",
        "byte fallback": "byte fallback",
        "metaspace": "other",
        "undecoded": "other",
    }


@pytest.mark.parametrize("name", _KNOWING)
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_joined_are_the_text_decoded_at_once(
    name: str, tokenizers: dict[str, HubTokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers[name]
    prompt, answer = data.draw(token_ids(tokenizer)), data.draw(token_ids(tokenizer))
    check(tokenizer, prompt, answer, skip=skip)


def test_bytes_of_the_prompt_before_its_last_word_are_left_where_they_are(tokenizer: HubTokenizer) -> None:
    prompt = [*words(tokenizer, " "), *spell(tokenizer, "é".encode()), *words(tokenizer, " ")[-1:]]
    check(tokenizer, [*prompt, *spell(tokenizer, b"0")], spell(tokenizer, "é".encode()[1:]), skip=False)


@pytest.mark.parametrize("name", ["metaspace", "undecoded"])
@given(prompt=TEXTS, answer=TEXTS, skip=st.booleans())
@example(prompt="", answer=" a", skip=True)
def test_so_they_are_where_only_the_decoder_knows(
    name: str, tokenizers: dict[str, HubTokenizer], prompt: str, answer: str, skip: bool
) -> None:
    tokenizer = tokenizers[name]
    before, after = words(tokenizer, prompt.replace("\ufffd", "")), words(tokenizer, answer)
    if after:
        text = tokenizer.decode([*before, *after], skip_special_tokens=skip)
        shown = tokenizer.decode(before, skip_special_tokens=skip)
        assert "".join(pieces(tokenizer, before, after, skip_special_tokens=skip)) == text[len(shown) :]


@given(data=st.data())
def test_bytes_are_shown_as_soon_as_they_are_a_character(
    tokenizers: dict[str, HubTokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers["byte level"]
    prompt, answer = data.draw(token_ids(tokenizer)), data.draw(token_ids(tokenizer))
    start = whole(tokenizer, prompt, skip=True)
    stream, text = detokenizer(tokenizer, prompt), ""
    for count, token in enumerate(answer, start=1):
        text += stream.push(token)
        tokens = [*prompt, *answer[:count]]
        assert text == tokenizer.decode(tokens)[start : whole(tokenizer, tokens, skip=True)]


def test_a_character_is_open_where_the_window_fills_up() -> None:
    check_open_windows()


def test_half_of_a_surrogate_pair_is_no_beginning_of_a_character(tokenizer: HubTokenizer) -> None:
    """Python's own decoder waits for more, and would count it to the answer where a prompt ends with it."""
    half = spell(tokenizer, b"\xed\xa0")
    for prompt, answer in (([], [*half, *words(tokenizer, "row")]), (half, words(tokenizer, "row"))):
        check(tokenizer, prompt, answer, skip=True)
    assert detokenizer(tokenizer, half).finish() == ""


@given(text=TEXTS.map(lambda text: text.replace("\ufffd", "")), cut=st.integers(0, 3))
def test_no_replacement_character_before_the_end(tokenizers: dict[str, HubTokenizer], text: str, cut: int) -> None:
    for tokenizer in tokenizers.values():
        if tokenizer.pieces.decoding != "other":
            ids = spell(tokenizer, text.encode())
            given_out = pieces(tokenizer, [], ids[: len(ids) - cut])
            assert not any("\ufffd" in piece for piece in given_out[:-1])


def test_a_run_of_bytes_shows_as_the_tokenizer_shows_it(tokenizers: dict[str, HubTokenizer]) -> None:
    """A decoder with byte fallback makes replacement characters of a whole run if its last character is cut."""
    text = "你😀".encode()
    shown = {name: pieces(tokenizers[name], [], spell(tokenizers[name], text[:-1])) for name in _KNOWING}
    assert shown["byte level"] == ["", "", "你", "", "", "", "\ufffd"]
    assert shown["byte fallback"] == ["", "", "", "", "", "", "\ufffd" * 6]
    tokenizer = tokenizers["byte fallback"]
    ended = pieces(tokenizer, [], [*spell(tokenizer, text), *words(tokenizer, "row")])
    assert ended[:7] == [""] * 7
    assert "".join(ended) == "你😀 row"


def test_a_prompt_that_ends_inside_a_character_is_not_given_out_again(tokenizer: HubTokenizer) -> None:
    emoji = "😀".encode()
    prompt = [*words(tokenizer, "row"), *spell(tokenizer, emoji[:2])]
    answer = [*spell(tokenizer, emoji[2:]), *words(tokenizer, " row")]
    assert "".join(pieces(tokenizer, prompt, answer)).startswith("😀")
    assert pieces(tokenizer, prompt, []) == [""]


def test_a_replacement_character_that_a_prompt_ends_with_is_the_prompts(tokenizer: HubTokenizer) -> None:
    prompt = [*words(tokenizer, "row"), *spell(tokenizer, "\ufffd".encode())]
    assert "".join(pieces(tokenizer, prompt, words(tokenizer, "over"))).strip() == "over"


def test_the_space_before_a_word_is_kept_wherever_the_answer_begins(tokenizers: dict[str, HubTokenizer]) -> None:
    tokenizer = tokenizers["byte fallback"]
    tool, end = (tokenizer.inner.convert_tokens_to_ids(token) for token in ("<tool>", "</s>"))
    row = words(tokenizer, "row")
    assert "".join(pieces(tokenizer, words(tokenizer, "if:\n"), row)) == " row"
    assert "".join(pieces(tokenizer, [*row, end], row)) == " row"  # left of it is only what is not shown
    assert "".join(pieces(tokenizer, [*row, end], row, skip_special_tokens=False)) == " row"
    assert "".join(pieces(tokenizer, [end], row)) == "row"  # a text begins without its first space
    assert "".join(pieces(tokenizer, [], [*row, tool, end, *row])) == "row<tool> row"


def test_spaces_between_special_tokens_are_the_decoders_or_left_out(tokenizers: dict[str, HubTokenizer]) -> None:
    tokenizer = tokenizers["undecoded"]
    tool, end = (tokenizer.inner.convert_tokens_to_ids(token) for token in ("<tool>", "</s>"))
    answer = [tool, end, end, *words(tokenizer, "row")[:1], tool]

    def shown(prompt: list[int], **options: bool) -> str:
        return "".join(pieces(tokenizer, prompt, answer, **options))

    first = tokenizer.inner.convert_ids_to_tokens(words(tokenizer, "row")[0])
    assert shown([], skip_special_tokens=False) == f"<tool> </s> </s> {first} <tool>"
    spaceless = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert shown([], **spaceless) == f"<tool></s></s> {first} <tool>"
    assert shown([end], **spaceless) == f"<tool></s></s> {first} <tool>"
    assert shown([], spaces_between_special_tokens=False) == f"<tool> {first} <tool>"


@pytest.mark.parametrize("name", MADE)
def test_a_token_costs_the_same_however_long_the_answer(
    name: str, tokenizers: dict[str, HubTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in tokens that the decoder is given, over an endless run of bytes that never become a character too."""
    tokenizer, decoded = tokenizers[name], []
    plain = HubTokenizer.decode

    def counted(self: HubTokenizer, ids: list[int], **options: bool) -> str:
        decoded.append(len(ids))
        return plain(self, ids, **options)

    monkeypatch.setattr(HubTokenizer, "decode", counted)
    for answer in (words(tokenizer, "row by row over 你好 😀 ") * 200, spell(tokenizer, b"\xff") * 2000):
        decoded.clear()
        pieces(tokenizer, words(tokenizer, "over and under " * 300), answer)
        assert sum(decoded) <= 24 * len(answer) + 100


@pytest.mark.parametrize("name", MADE)
def test_the_text_of_a_token_is_what_it_shows_in_mid_text(name: str, tokenizers: dict[str, HubTokenizer]) -> None:
    tokenizer = tokenizers[name]
    anchor = words(tokenizer, "row")
    for token in range(0, len(tokenizer.inner), 7):
        together, alone = (tokenizer.decode(ids, skip_special_tokens=False) for ids in ([*anchor, token], anchor))
        assert tokenizer.token_text(token) == together[len(alone) :]


def test_bytes_of_a_token_are_those_of_the_library(tokenizers: dict[str, HubTokenizer]) -> None:
    tokenizer = tokenizers["byte level"]
    for token in range(len(tokenizer.inner) + 2):
        expected = tokenizer.decode([token], skip_special_tokens=False)
        assert tokenizer.pieces.bytes_of(token).decode(errors="replace") == expected


def test_a_class_with_a_decoder_of_its_own_is_not_second_guessed(tokenizers: dict[str, HubTokenizer]) -> None:
    from weft.tokenizer.pieces import pieces_of

    inner = tokenizers["byte level"].inner
    own = type("Own", (type(inner),), {"_decode": lambda self, *args, **options: "x"})
    assert pieces_of(own(tokenizer_object=inner.backend_tokenizer)).decoding == "other"


@pytest.fixture(scope="module")
def of_gguf(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    return HubTokenizer(save(byte_level_of_gguf(), tmp_path_factory.mktemp("gguf"), added=["<tool>", "é"]))


@given(data=st.data(), skip=st.booleans())
@example(data=None, skip=False)
def test_bytes_behind_decoders_that_find_nothing_to_do_are_bytes(
    of_gguf: HubTokenizer, data: st.DataObject | None, skip: bool
) -> None:
    assert of_gguf.pieces.decoding == "bytes"
    if data is None:  # a byte that begins no character is replaced in the prompt, and not shown again
        prompt, answer = spell(of_gguf, b"\x80"), spell(of_gguf, b"\0")
    else:
        prompt, answer = data.draw(token_ids(of_gguf)), data.draw(token_ids(of_gguf))
    check(of_gguf, prompt, answer, skip=skip)


@pytest.mark.parametrize("piece", ["日本", "<a tool>", "▁", "<0x41>"])
def test_one_piece_that_those_decoders_change_makes_all_of_them_matter(piece: str, tmp_path: Path) -> None:
    assert HubTokenizer(save(byte_level_of_gguf(), tmp_path, added=[piece])).pieces.decoding == "other"
