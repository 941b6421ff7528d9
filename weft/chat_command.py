"""`weft chat`: a conversation in the terminal, or one message a line from a pipe."""

import argparse
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, cast

from weft.command_arguments import (
    add_model,
    add_sampling,
    json_line,
    model_options,
    sampling_params,
    standard_input,
)
from weft.errors import RequestError, nearest

if TYPE_CHECKING:
    from weft.inference.sampling_params import SamplingParams
    from weft.llm import LLM
    from weft.outputs import RequestOutput

# Sampling parameters that a conversation has no arguments for, and why.
WITHOUT = {
    "n": "the conversation goes on with one answer",
    "logprobs": "what is shown of an answer is its text; `weft generate --json` has them",
    "prompt_logprobs": "as logprobs",
    "detokenize": "what is said is text",
}
COMMANDS = {"/reset": "forget the conversation", "/exit": "leave"}


def add_chat(commands: Any) -> None:
    """Add the command `chat` to an argparse object of sub-commands."""
    chat = commands.add_parser(
        "chat",
        allow_abbrev=False,
        help="talk with a model",
        description="Answer one message after the other, as it comes: typed in, or a line each from a pipe. "
        + "; ".join(f"{name}: {meaning}" for name, meaning in COMMANDS.items())
        + ". Ctrl-C ends an answer, Ctrl-D the conversation.",
        epilog="example: echo 'Who are you?' | weft chat --system 'Answer in one sentence.' --temperature 0",
    )
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_model(chat)
    add_sampling(chat, without=WITHOUT, max_tokens=512)
    chat.add_argument("--json", action="store_true", help="print one JSON object an answer instead of text")
    chat.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from weft.inference.sampling_params import SamplingParams
    from weft.llm import LLM  # seconds to import: --help and a bad argument should not wait for them

    sampling_params(options, SamplingParams())  # a bad one should not wait for the model either
    llm = LLM(**model_options(options), max_num_seqs=1)
    params = sampling_params(options, llm.default_sampling_params())
    chat = Chat(llm, params, options.system, as_json=options.json, interactive=sys.stdin.isatty())
    return 0 if chat.run(typed() if chat.interactive else standard_input()) else 1


def typed() -> Iterator[str]:
    """What somebody types, line by line, until Ctrl-D; Ctrl-C drops the line."""
    with suppress(ImportError):  # not everywhere
        import readline  # noqa: F401  # input() edits lines and remembers them once this is there

    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D or /exit leaves")
            continue
        yield line


# What a terminal would obey, as something to be seen: control characters but for tab and line feed.
PICTURES = {
    **{code: 0x2400 + code for code in range(32) if code not in b"\t\n"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}


class Chat:
    """A conversation under way.

    interactive: somebody types; an interrupt ends the answer, not the conversation, and control characters of an answer
        do nothing to the terminal.
    """

    def __init__(
        self, llm: "LLM", params: "SamplingParams", system: str | None, *, as_json: bool, interactive: bool
    ) -> None:
        self._llm, self._params = llm, params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._as_json = as_json
        self.interactive = interactive

    def run(self, lines: Iterable[str]) -> bool:
        """Until the lines end or one says so. Whether every message was answered."""
        answered = True
        for line in lines:
            message = line.strip()
            if message == "/exit":
                break
            if message == "/reset":
                self._messages = list(self._opening)
            elif message.startswith("/") and len(message.split()) == 1:
                print(f"weft: unknown command {message!r}\nhint: {nearest(message, COMMANDS)}", file=sys.stderr)
                answered = False
            elif message:
                answered = self._answer(message) and answered
        return answered

    def _answer(self, message: str) -> bool:
        asked = [*self._messages, {"role": "user", "content": message}]
        text, token_ids, last = "", [], None
        try:
            # Closed whatever comes: the engine is free for the next message.
            with closing(cast("Generator[RequestOutput]", self._llm.stream_chat(asked, self._params))) as stream:
                for output in stream:
                    (last,) = output.outputs
                    text += last.text or ""
                    token_ids += last.token_ids
                    if not self._as_json:
                        self._show(last.text or "")
        except RequestError as error:  # the conversation stays as it was
            print(f"weft: {error}", file=sys.stderr)
            return False
        except KeyboardInterrupt:
            if not self.interactive:
                raise
        if self._as_json:
            answer = {
                "role": "assistant",
                "content": text,
                "token_ids": token_ids,
                "finish_reason": None if last is None else last.finish_reason,
                "stop_reason": None if last is None else last.stop_reason,
                "error": None if last is None else last.error,
            }
            print(json_line(answer), flush=True)
        else:
            print(flush=True)
        if text or (last is not None and last.finish_reason is not None):  # interrupted in time, it was never asked
            self._messages = [*asked, {"role": "assistant", "content": text}]
        if last is not None and last.finish_reason == "error":
            print(f"weft: the answer breaks off: {last.error}", file=sys.stderr)
            return False
        return True

    def _show(self, text: str) -> None:
        print(text.translate(PICTURES) if self.interactive else text, end="", flush=True)
