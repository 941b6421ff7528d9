"""What the commands that generate have in common: which model, how to sample, what comes from standard input."""

import argparse
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from typing import Any, TextIO

from weft.config import DTYPE_ALIASES, DTYPES
from weft.inference.sampling_params import SamplingParams


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids, such as 5,17") from None


def _biases(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of token ids and biases, such as 5:-100,17:2.5"
        ) from None


# Argument by field, with its type, its metavar and what --help says. What is not given leaves the field as it is.
_VALUES: dict[str, tuple[Callable[[str], object], str, str]] = {
    "n": (int, "N", "answers to each prompt"),
    "max_tokens": (int, "TOKENS", "new tokens at most"),
    "min_tokens": (int, "TOKENS", "new tokens before anything may stop"),
    "temperature": (float, "TEMPERATURE", "0 is greedy"),
    "top_k": (int, "K", "sample from the K most probable tokens; 0 is all"),
    "top_p": (float, "P", "sample from the most probable tokens that together have this probability"),
    "min_p": (float, "P", "sample from tokens at least this often as probable as the most probable"),
    "seed": (int, "SEED", "seed of the sampling noise"),
    "presence_penalty": (float, "PENALTY", "off the logits of tokens that the output holds"),
    "frequency_penalty": (float, "PENALTY", "the same for each time"),
    "repetition_penalty": (float, "PENALTY", "factor against tokens of prompt and output; 1 is none"),
    "logit_bias": (_biases, "ID:BIAS,...", "what is added to the logits of these tokens"),
    "allowed_token_ids": (_token_ids, "ID,...", "the only tokens of the output"),
    "stop_token_ids": (_token_ids, "ID,...", "tokens that end the output, beside the model's own"),
    "logprobs": (int, "K", "give the logprobs of the K most probable tokens in each place, in --json; -1 is all"),
    "prompt_logprobs": (int, "K", "the same in each place of the prompt, in --json"),
}
_TEXTS = {
    "stop": "end before this text; may be given again",
    "bad_words": "a word that does not occur in the output; may be given again",
}
# Argument by field of those that are on or off.
_SWITCHES = {
    "include_stop_str_in_output": ("--include-stop", "show the text, or token, that ended an answer"),
    "ignore_eos": ("--ignore-eos", "do not stop at the model's end-of-sequence ids"),
    "detokenize": ("--no-detokenize", "give token ids and no text, in --json"),
    "skip_special_tokens": ("--no-skip-special-tokens", "show special tokens"),
    "spaces_between_special_tokens": (
        "--no-spaces-between-special-tokens",
        "without the space that some tokenizers put there, where special tokens show",
    ),
}


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder, .gguf file or hub id (%(default)s)")
    parser.add_argument("--max-model-len", type=int, help="longest sequence, prompt included (the model's own limit)")
    parser.add_argument("--dtype", default="auto", help="%(default)s; one of " + ", ".join((*DTYPES, *DTYPE_ALIASES)))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """As `LLM` takes them."""
    return {name: getattr(options, name) for name in ("model", "max_model_len", "dtype", "device")}


def add_sampling(parser: argparse.ArgumentParser, *, without: Collection[str] = (), **defaults: Any) -> None:
    """An argument for each field of SamplingParams.

    without: fields that the command does not have.   defaults: what it says where nothing is asked for.
    """
    for name, (kind, metavar, meaning) in _VALUES.items():
        if name not in without:
            default = defaults.get(name)
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                type=kind,
                default=default,
                metavar=metavar,
                help=meaning + ("" if default is None else " (%(default)s)"),
            )
    for name, meaning in _TEXTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="append", metavar="TEXT", help=meaning)
    for name, (flag, meaning) in _SWITCHES.items():
        if name not in without:
            parser.add_argument(flag, action="store_const", const=not flag.startswith("--no-"), dest=name, help=meaning)


def sampling_params(options: argparse.Namespace, base: SamplingParams) -> SamplingParams:
    """`base` with what was asked for. Raises: SamplingParamsError."""
    given = {item.name: getattr(options, item.name, None) for item in fields(SamplingParams)}
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def json_line(value: object) -> str:
    """JSON as standard output can show it: as it is read, or where that is no UTF-8 in ASCII alone."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return json.dumps(value, ensure_ascii=not encoding.lower().startswith("utf"))


def standard_input() -> TextIO:
    """As a text whatever its bytes: the tokenizer refuses what is none, and says where."""
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin
