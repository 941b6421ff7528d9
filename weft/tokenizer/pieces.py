"""What a decoder makes of single tokens: their bytes, and which of them are special. Knows no text of many tokens."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal

Decoding = Literal["bytes", "byte fallback", "other"]
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's
# What transformers 5.17 makes of a GGUF's byte BPE: all but the last is for SentencePiece, and finds nothing to do
# unless a piece has its space, or is a fallback byte, or makes the fused text one that is not spelled in bytes.
_GGUF_BYTES = ["ByteFallback", "Fuse", "Replace", "ByteLevel"]


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet, in which bytes are written: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in printable}, **shifted}


class Pieces:
    """The vocabulary of one tokenizer as its decoder sees it.

    decoding: "bytes" if the text is the tokens' bytes, one after another (GPT-2, Llama 3, Qwen); "byte fallback" if
        some tokens are bytes, and a run of them is decoded as a whole (Llama 2, Mistral); "other" if it is neither.
    special: ids that `skip_special_tokens` leaves out.   added: what each added token shows alone, special ones too.
    """

    def __init__(
        self,
        decoding: Decoding,
        piece_of: Callable[[int], str | None],
        special: frozenset[int],
        added: Mapping[int, str],
    ) -> None:
        """piece_of: None for an unknown id."""
        self.decoding = decoding
        self.special, self.added = special, dict(added)
        self._piece_of = piece_of
        self._bytes: dict[int, bytes] = {}
        self._fallback_bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text of bytes. One with a character outside the alphabet stands for itself."""
        known = self._bytes.get(token_id)
        if known is None:
            piece, alphabet = self._piece_of(token_id) or "", _byte_of_character()
            spelled = [alphabet.get(character) for character in piece]
            known = piece.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
            self._bytes[token_id] = known
        return known

    def fallback_byte(self, token_id: int) -> bytes:
        """The byte that stands in a run of bytes; empty for every other token."""
        if self.decoding != "byte fallback":
            return b""
        known = self._fallback_bytes.get(token_id)
        if known is None:
            match = _FALLBACK.fullmatch(self._piece_of(token_id) or "")
            known = self._fallback_bytes[token_id] = b"" if match is None else bytes([int(match[1], 16)])
        return known

    def is_known(self, token_id: int) -> bool:
        """Whether the vocabulary has it: a model may have more rows than its tokenizer tokens."""
        return self._piece_of(token_id) is not None


def pieces_of(inner: Any) -> Pieces:
    """Those of a tokenizer of `transformers`."""
    from transformers import PreTrainedTokenizerFast

    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:  # one in Python: what it decodes is not written down
        added = {token_id: str(token) for token_id, token in inner.added_tokens_decoder.items()}
        size = len(inner)
        return Pieces(
            "other",
            lambda token_id: inner.convert_ids_to_tokens(token_id) if token_id < size else None,
            frozenset(inner.all_special_ids),
            added,
        )
    # A class with a way of decoding of its own does not do only what its file says.
    is_plain = type(inner)._decode is PreTrainedTokenizerFast._decode and backend.decoder is not None
    tokens = backend.get_added_tokens_decoder()
    return Pieces(
        _decoding(backend.decoder.__getstate__(), backend.get_vocab) if is_plain else "other",
        backend.id_to_token,
        frozenset(token_id for token_id, token in tokens.items() if token.special),
        {token_id: backend.decode([token_id], skip_special_tokens=False) for token_id in tokens},
    )


def _decoding(decoder: bytes, vocabulary: Callable[[], Iterable[str]]) -> Decoding:
    """decoder: its own description, JSON as in a tokenizer.json.   vocabulary: read only where a piece may matter."""
    state = json.loads(decoder)
    parts = state.get("decoders", [state])
    types = [part["type"] for part in parts]
    if types == ["ByteLevel"]:
        return "bytes"
    if types == _GGUF_BYTES and parts[2]["pattern"] == {"String": _SPACE}:
        return "bytes" if _is_spelled_in_bytes(vocabulary()) else "other"
    return "byte fallback" if "ByteFallback" in types and "ByteLevel" not in types else "other"


def _is_spelled_in_bytes(vocabulary: Iterable[str]) -> bool:
    """Whether every piece keeps to the alphabet and none is a fallback byte."""
    alphabet = _byte_of_character().keys()
    return all(alphabet >= set(piece) and _FALLBACK.fullmatch(piece) is None for piece in vocabulary)
