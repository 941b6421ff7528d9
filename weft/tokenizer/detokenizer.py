"""Tokens to text, one token at a time, so that the pieces joined are the text decoded at once.

The text of an answer is what it adds to the text of its prompt:

    decode(prompt + answer)[len(decode(whole prompt)):]

where the whole prompt leaves out the bytes of a character that the prompt begins and does not end (where a decoder's
bytes are not known, U+FFFD at the end of the prompt stands for such). An answer without a visible token adds nothing.
A piece never ends inside a character and is never taken back: what the next token could still change is held back, and
shown at the end as the tokenizer shows it.

The `DecodeStream` of the tokenizers library does not do: it has no end, so that it loses a truncated character; it
gives out the prompt again where that ends inside one; and over bytes that never become one its buffer grows and grows.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from weft.tokenizer.pieces import Pieces

_REPLACEMENT = "\ufffd"
_OPEN_BYTES = 3  # a character of UTF-8 has four bytes at most
_CONTEXT = 8  # tokens left of the new one where a decoder's ways are unknown
_LONGEST_WINDOW = 16  # tokens decoded for each new one


@runtime_checkable
class Detokenizer(Protocol):
    """One answer under way."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        ...

    def finish(self) -> str:
        """What was held back. No token may follow."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def pieces(self) -> Pieces: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


def detokenizer(
    decoder: Decoder,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """For an answer to this prompt.

    spaces_between_special_tokens: False leaves out the space that some decoders put between two added tokens in a row;
        without effect where special tokens are skipped, as in vLLM.
    """
    if decoder.pieces.decoding == "bytes":
        return _OfBytes(decoder.pieces, prompt_token_ids, skip_special_tokens)
    spaced = skip_special_tokens or spaces_between_special_tokens
    return _OfWindow(decoder, prompt_token_ids, skip_special_tokens, spaced)


class _OfBytes:
    """Where the text is the tokens' bytes: they are put together here, and nothing is decoded twice."""

    def __init__(self, pieces: Pieces, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._bytes_of = pieces.bytes_of
        self._hidden = pieces.special if skip_special_tokens else frozenset()
        self._characters = _Utf8()
        self._is_empty = True
        tail = b""  # an open character is one of the last bytes, wherever the text before it is cut
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._hidden:
                tail = self._bytes_of(token_id) + tail
            if len(tail) >= _OPEN_BYTES:
                break
        self._characters.push(tail[-_OPEN_BYTES:])

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._is_empty = False
        return self._characters.push(self._bytes_of(token_id))

    def finish(self) -> str:
        return "" if self._is_empty else self._characters.finish()


class _OfWindow:
    """Where only the decoder knows: it decodes the last few tokens again for each new one.

    The window begins at a token that shows text, so that a decoder which drops the space of a first word drops none of
    what comes after. A run of bytes shows together or not at all (a decoder may make all of it replacement characters
    because of its last byte), so it is held back until a token ends it, and is not cut while it may go on.
    """

    def __init__(
        self, decoder: Decoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool, spaced: bool
    ) -> None:
        self._pieces, self._decode_tokens = decoder.pieces, decoder.decode
        self._hidden = self._pieces.special if skip_special_tokens else frozenset()
        self._unspaced = {} if spaced else self._pieces.added
        self._knows_bytes = self._pieces.decoding == "byte fallback"
        self._is_empty = True
        self._window: list[int] = []  # visible tokens
        self._shown = 0  # characters of the window's text that are the prompt's, or were given out
        self._open_window(prompt_token_ids)
        self._longest = max(_LONGEST_WINDOW, 2 * len(self._window))

    def push(self, token_id: int) -> str:
        if token_id in self._hidden or not self._pieces.is_known(token_id):
            return ""
        self._is_empty = False
        follows_added = token_id in self._unspaced and self._window[-1:] and self._window[-1] in self._unspaced
        self._window.append(token_id)
        if self._pieces.fallback_byte(token_id):
            return ""
        text = self._decode(self._window)
        if follows_added and text.endswith(content := self._unspaced[token_id]):
            before = text[self._shown : len(text) - len(content)]
            self._shown = len(text)
            return before.removesuffix(" ") + content
        whole = len(text) - self._num_held(text)
        piece = text[self._shown : whole]
        self._shown = max(self._shown, whole)
        if len(self._window) >= self._longest:
            self._shorten(len(text) - self._shown)
        return piece

    def finish(self) -> str:
        return "" if self._is_empty else self._decode(self._window)[self._shown :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._decode_tokens(token_ids, skip_special_tokens=False)  # those to be skipped are left out already

    def _num_held(self, text: str) -> int:
        """Characters at the end that the next token may change."""
        if self._knows_bytes:  # and a byte does not come here, so what is replaced stays so
            return 0
        return min(len(text) - len(text.rstrip(_REPLACEMENT)), _OPEN_BYTES)

    def _open_window(self, prompt_token_ids: Sequence[int]) -> None:
        run: list[int] = []  # bytes at the end of the prompt, last first
        tokens = reversed(prompt_token_ids)
        for token_id in tokens:
            if token_id in self._hidden or not self._pieces.is_known(token_id):
                continue
            if not self._window and self._pieces.fallback_byte(token_id):
                run.append(token_id)
                continue
            self._window.insert(0, token_id)
            if self._is_context(self._window):
                break
        self._window += reversed(run)
        if self._knows_bytes:
            last = _Utf8()
            last.push(b"".join(self._pieces.fallback_byte(token_id) for token_id in run[_OPEN_BYTES - 1 :: -1]))
            self._shown = len(self._decode(self._window[: len(self._window) - last.num_open]))
        else:
            text = self._decode(self._window)
            self._shown = len(text) - self._num_held(text)

    def _is_context(self, token_ids: list[int]) -> bool:
        return (self._knows_bytes or len(token_ids) >= _CONTEXT) and bool(self._decode(token_ids))

    def _shorten(self, num_held: int) -> None:
        """Keep as few of the last tokens as are a context. num_held: characters at the end not given out."""
        for kept in range(1, len(self._window)):
            tail = self._window[-kept:]
            if self._is_context(tail):
                self._window, self._shown = tail, len(self._decode(tail)) - num_held
                return
        self._longest *= 2  # ever rarer, so that a token costs the same


class _Utf8:
    """Bytes to characters, as soon as they are whole; U+FFFD for what can become none.

    Python's decoder, but for one thing: it waits for a third byte after a first half of a surrogate pair.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def num_open(self) -> int:
        """Bytes at the end that begin a character and do not end it."""
        return len(self._decoder.getstate()[0])

    def push(self, part: bytes) -> str:
        text = self._decoder.decode(part)
        if part and 0xA0 <= part[-1] < 0xC0 and self._decoder.getstate()[0][:1] == b"\xed":
            text += self._decoder.decode(b"", True)
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)
