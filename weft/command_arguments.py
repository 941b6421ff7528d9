"""What the commands that generate have in common: which model, how to sample, what comes from standard input."""

import argparse
import sys
from dataclasses import replace
from typing import Any, TextIO

from weft.config import DTYPE_ALIASES, DTYPES
from weft.inference.sampling_params import SamplingParams

# Argument by field, with its type and what --help says. None leaves the field as it is.
_SAMPLING: dict[str, tuple[type, str]] = {
    "n": (int, "answers to each prompt"),
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "sample from the K most probable tokens; 0 is all"),
    "top_p": (float, "sample from the most probable tokens that together have this probability"),
    "min_p": (float, "sample from tokens at least this often as probable as the most probable"),
    "presence_penalty": (float, "off the logits of tokens that the output holds"),
    "frequency_penalty": (float, "the same for each time"),
    "repetition_penalty": (float, "factor against tokens of prompt and output; 1 is none"),
    "seed": (int, "seed of the sampling noise"),
    "min_tokens": (int, "new tokens before anything may stop"),
    "logprobs": (int, "give the logprobs of this many tokens in each place, in --json"),
}


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder, .gguf file or hub id (%(default)s)")
    parser.add_argument("--max-model-len", type=int, help="longest sequence, prompt included (the model's own limit)")
    parser.add_argument("--dtype", default="auto", help="%(default)s; one of " + ", ".join((*DTYPES, *DTYPE_ALIASES)))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """As `LLM` takes them."""
    return {name: getattr(options, name) for name in ("model", "max_model_len", "dtype", "device")}


def add_sampling(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = (), **defaults: Any) -> None:
    """without: fields that the command does not have.   defaults: what it says where nothing is asked for."""
    for name, (kind, meaning) in _SAMPLING.items():
        if name not in without:
            default = defaults.get(name)
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                type=kind,
                default=default,
                metavar=name.rsplit("_", 1)[-1].upper(),
                help=meaning + ("" if default is None else " (%(default)s)"),
            )
    parser.add_argument(
        "--max-tokens", type=int, default=defaults["max_tokens"], help="new tokens at most (%(default)s)"
    )
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    parser.add_argument("--include-stop", action="store_true", help="show the text that ended an answer")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end-of-sequence ids")


def sampling_params(options: argparse.Namespace, base: SamplingParams) -> SamplingParams:
    """`base` with what was asked for."""
    given = {name: getattr(options, name, None) for name in _SAMPLING}
    return replace(
        base,
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=options.max_tokens,
        stop=options.stop or (),
        include_stop_str_in_output=options.include_stop,
        ignore_eos=options.ignore_eos,
    )


def standard_input() -> TextIO:
    """As a text whatever its bytes: the tokenizer refuses what is none, and says where."""
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin
