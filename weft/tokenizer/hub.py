"""A checkpoint's own tokenizer, run by HuggingFace's library: text to token ids and back.

Knows no model, no request and no stop string.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.errors import CheckpointNotFoundError, RequestError
from weft.tokenizer.chat import render
from weft.tokenizer.detokenizer import Detokenizer, detokenizer
from weft.tokenizer.pieces import Pieces, pieces_of


class HubTokenizer:
    """`encode` and `decode` as the checkpoint's authors meant them, special tokens included."""

    def __init__(self, folder: Path, gguf_file: str | None = None) -> None:
        """Raises: CheckpointNotFoundError if the folder has no tokenizer."""
        from transformers import AutoTokenizer  # seconds to import, and not needed for token-id prompts

        options = {} if gguf_file is None else {"gguf_file": gguf_file}
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
        except Exception as error:  # of whatever reads the files, and malformed JSON makes it raise anything
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            raise CheckpointNotFoundError(
                f"{folder} has no tokenizer that can be loaded: {reason}",
                hint="pass skip_tokenizer_init=True and prompts of token ids",
            ) from error
        self._token_texts: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer puts around a text unless told not to.

        Raises: RequestError for half of a surrogate pair, which is no text (a file name or argument may carry one).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"character {error.start} of the text, {text[error.start]!r}, is no Unicode") from error
        ids: list[int] = self.inner(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text, without special tokens unless asked for; spaces as they are."""
        text: str = self.inner.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def pieces(self) -> Pieces:
        return pieces_of(self.inner)

    def detokenizer(self, prompt_token_ids: Sequence[int], **options: bool) -> Detokenizer:
        """Text of one answer, token by token; options as of `weft.tokenizer.detokenizer.detokenizer`."""
        return detokenizer(self, prompt_token_ids, **options)

    def token_text(self, token_id: int) -> str:
        """What the token shows in mid-text, its leading space included; a part of a character is U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            shown = self.detokenizer(self._mid_text, skip_special_tokens=False)
            text = self._token_texts[token_id] = shown.push(token_id) + shown.finish()
        return text

    @cached_property
    def _mid_text(self) -> list[int]:
        """Tokens of a word, after which a space is a space."""
        return self.encode("a", add_special_tokens=False)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The conversation in the model's own template, ending where the assistant is to speak.

        Options and errors as of `weft.tokenizer.chat.render`. Its token ids are those of `encode` without special
        tokens: a template writes its own, and a second BOS would be one too many.
        """
        return render(self.inner, messages, **options)
