"""The command line: `weft generate`, `chat`, `verify`, `bench`. Each command is a thin shell around the library."""

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from weft import __version__
from weft.benchmark.command import add_bench
from weft.chat_command import add_chat
from weft.command_arguments import (
    add_model,
    add_sampling,
    json_line,
    model_options,
    sampling_params,
    standard_input,
)
from weft.errors import ConfigError, WeftError
from weft.inference.sampling_params import SamplingParams
from weft.verify_command import add_verify

if TYPE_CHECKING:
    from weft.outputs import RequestOutput


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 only if it did what was asked."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("weft").setLevel(logging.INFO)
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # what a terminal cannot show is shown by number, and no answer is lost
        sys.stdout.reconfigure(errors="backslashreplace")
    return exit_status("weft", lambda: int(options.run(options)))


def exit_status(program: str, run: Callable[[], int]) -> int:
    """What a program ends with: its own status, or that of what went wrong, which is told in its name."""
    try:
        status = run()
        _flush()
        return status
    except WeftError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read has left, as `head` does
        _forget_output()
        return 141
    except OSError as error:  # a full disk, under standard output or a file
        print(f"{program}: {error}", file=sys.stderr)
        _forget_output()
        return 2


def _flush() -> None:
    if sys.stdout is not None:  # as it is where whoever started the program has closed it
        sys.stdout.flush()


def _forget_output() -> None:
    """Nothing of what waits to be written may fail once more at exit."""
    with suppress(OSError):
        _flush()
        return
    with suppress(OSError):  # a stream without a descriptor has nothing that waits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft", allow_abbrev=False, description="A small LLM serving engine that proves itself."
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        allow_abbrev=False,
        help="continue prompts",
        description="Continue each prompt and print the text.",
        epilog="example: weft generate 'The capital of France is' --temperature 0.7 --top-p 0.9 --seed 1 --stop .",
    )
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="a prompt; - reads one from standard input")
    add_model(generate)
    add_sampling(generate, temperature=0.0, max_tokens=64)
    generate.add_argument("--stream", action="store_true", help="print as it comes, one prompt after the other")
    generate.add_argument("--json", action="store_true", help="print JSON instead of text, a line each output")
    generate.set_defaults(run=_generate)
    add_chat(commands)
    add_verify(commands)
    add_bench(commands)
    return parser


def _generate(options: argparse.Namespace) -> int:
    params = sampling_params(options, SamplingParams())
    if options.stream and params.n > 1:
        raise ConfigError(f"--stream shows one answer as it comes, got --n {params.n}", hint="leave out one of them")
    if not options.json:
        for flag, value in (("--logprobs", params.logprobs), ("--prompt-logprobs", params.prompt_logprobs)):
            if value is not None:
                raise ConfigError(f"{flag} {value} is shown in JSON alone", hint="add --json")
        if not params.detokenize:
            raise ConfigError("--no-detokenize leaves no text to print", hint="add --json")

    from weft.llm import LLM  # seconds to import: --help and a bad argument should not wait for them

    prompts = [standard_input().read() if prompt == "-" else prompt for prompt in options.prompts]
    llm = LLM(**model_options(options), max_num_seqs=min(len(prompts) * params.n, 16))
    failed = False
    if options.stream:
        for place, prompt in enumerate(prompts):
            for piece in chain([prompt], llm.stream(prompt, params), ["\n"]):
                if not isinstance(piece, str):
                    failed = _breaks_off(piece, place) or failed
                    print(_json_line(piece) if options.json else piece.outputs[0].text, end="", flush=True)
                elif not options.json:
                    print(piece, end="", flush=True)
        return int(failed)
    for place, output in enumerate(llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())):
        failed = _breaks_off(output, place) or failed
        texts = [f"{output.prompt}{answer.text}\n" for answer in output.outputs]
        print(_json_line(output) if options.json else "".join(texts), end="")
    return int(failed)


def _breaks_off(output: "RequestOutput", place: int) -> bool:
    """Whether an answer to this prompt ended in an error, which is then said."""
    failed = [answer for answer in output.outputs if answer.finish_reason == "error"]
    for answer in failed:
        print(f"weft: prompts[{place}]: the answer breaks off: {answer.error}", file=sys.stderr)
    return bool(failed)


def _json_line(output: "RequestOutput") -> str:
    from weft.outputs import as_json

    return json_line(as_json(output)) + "\n"
