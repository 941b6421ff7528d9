"""The law of detokenisation, by means that share nothing with weft's, and where its tokens are drawn from."""

from collections.abc import Sequence
from functools import cache
from itertools import product

from hypothesis import strategies as st

from weft.tokenizer.detokenizer import Decoder, detokenizer
from weft.tokenizer.hub import HubTokenizer
from weft.tokenizer.pieces import Pieces

_CONTINUATIONS = (0x80, 0x90, 0xA0)  # of them, each first byte of a character takes at least one

TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("  \n\tabcé你好世界😀👩\u200d🚀йנא\ufffd")),
    max_size=30,
)


@cache
def byte_tokens(tokenizer: HubTokenizer) -> dict[int, int]:
    """The token of each byte that has one."""
    vocabulary = tokenizer.inner.get_vocab()
    if "<0x00>" in vocabulary:
        return {byte: vocabulary[f"<0x{byte:02X}>"] for byte in range(256)}
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)}
    return {byte: vocabulary[letter] for byte, letter in letters.items() if letter in vocabulary}


@st.composite
def token_ids(draw: st.DrawFn, tokenizer: HubTokenizer) -> list[int]:
    """Words as the tokenizer writes them, text spelled in bytes, any bytes, and any ids, unknown ones too."""
    spelled = byte_tokens(tokenizer)
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        match draw(st.sampled_from(["words", "bytes", "any bytes", "any"])):
            case "words":
                ids += tokenizer.inner(draw(TEXTS), add_special_tokens=False)["input_ids"]
            case "bytes":
                ids += [spelled[byte] for byte in draw(TEXTS).encode() if byte in spelled]
            case "any bytes":
                ids += [spelled[byte] for byte in draw(st.binary(max_size=6)) if byte in spelled]
            case _:
                ids += draw(st.lists(st.integers(0, len(tokenizer.inner) + 3), max_size=6))
    return ids


def whole(tokenizer: HubTokenizer, ids: Sequence[int], *, skip: bool) -> int:
    """Characters of the text up to the last one that no further token can change."""
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    spelled = byte_tokens(tokenizer)
    if "<0x00>" not in tokenizer.inner.get_vocab():
        is_open = any(
            len(tokenizer.decode([*ids, spelled[byte]], skip_special_tokens=skip)) == len(text)
            for byte in _CONTINUATIONS
        )
        return len(text) - is_open
    shown = [token for token in ids if is_visible(tokenizer, token, skip=skip)]
    byte_of = {token: byte for byte, token in spelled.items()}
    for count in (3, 2, 1):
        tail = [byte_of.get(token) for token in shown[-count:]]
        if len(tail) == count and None not in tail and _begins_a_character(bytes(tail)):  # type: ignore[arg-type]
            return len(tokenizer.decode(shown[:-count], skip_special_tokens=skip))
    return len(text)


def _begins_a_character(tail: bytes) -> bool:
    for missing in (1, 2, 3):
        for rest in product(_CONTINUATIONS, repeat=missing):
            try:
                if len((tail + bytes(rest)).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                continue
    return False


def is_visible(tokenizer: HubTokenizer, token: int, *, skip: bool) -> bool:
    inner = tokenizer.inner
    return token < len(inner) and not (skip and token in inner.all_special_ids)


def pieces(tokenizer: Decoder, prompt: Sequence[int], answer: Sequence[int], **options: bool) -> list[str]:
    """What each token gave, and the end."""
    stream = detokenizer(tokenizer, prompt, **options)
    return [*(stream.push(token) for token in answer), stream.finish()]


def check(tokenizer: HubTokenizer, prompt: list[int], answer: list[int], *, skip: bool) -> None:
    """The pieces joined are what the answer adds to the text of the prompt."""
    given = pieces(tokenizer, prompt, answer, skip_special_tokens=skip)
    if not any(is_visible(tokenizer, token, skip=skip) for token in answer):
        assert given == [""] * len(given)
        return
    text = tokenizer.decode([*prompt, *answer], skip_special_tokens=skip)
    assert "".join(given) == text[whole(tokenizer, prompt, skip=skip) :]


class SilentBytes:
    """A decoder whose tokens are bytes, and which tells nobody."""

    pieces = Pieces("other", chr, frozenset(), {})

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


def check_open_windows() -> None:
    """Wherever in a character the window of a silent decoder fills up, nothing is lost and nothing is shown twice."""
    for lead in range(4):
        text = "a" * lead + "😀é你" * 12
        given = pieces(SilentBytes(), [], [*text.encode()])
        assert "".join(given) == text
        assert "\ufffd" not in "".join(given)
