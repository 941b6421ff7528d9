"""The command line: `weft generate`, `weft bench`. Each command is a thin shell around the library."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict

from weft import __version__
from weft.benchmark.command import add_bench
from weft.config import DTYPE_ALIASES, DTYPES
from weft.errors import WeftError
from weft.inference.sampling_params import SamplingParams


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 only if it did what was asked."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("weft").setLevel(logging.INFO)
    try:
        return int(options.run(options))
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


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
        epilog="example: weft generate 'The capital of France is' --temperature 0 --max-tokens 8",
    )
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="a prompt; - reads one from standard input")
    generate.add_argument("--model", default="smollm2-135m", help="alias, folder, .gguf file or hub id (%(default)s)")
    generate.add_argument("--max-tokens", type=int, default=64, help="new tokens at most (%(default)s)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    generate.add_argument("--seed", type=int, help="seed of the sampling noise")
    generate.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end-of-sequence ids")
    generate.add_argument("--max-model-len", type=int, help="longest sequence, prompt included (the model's own limit)")
    generate.add_argument("--dtype", default="auto", help="%(default)s; one of " + ", ".join((*DTYPES, *DTYPE_ALIASES)))
    generate.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    generate.add_argument("--json", action="store_true", help="print one JSON object a prompt instead of text")
    generate.set_defaults(run=_generate)
    add_bench(commands)
    return parser


def _generate(options: argparse.Namespace) -> int:
    from weft.llm import LLM  # seconds to import: --help and a bad argument should not wait for them

    params = SamplingParams(
        temperature=options.temperature,
        seed=options.seed,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
    )
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in options.prompts]
    llm = LLM(
        options.model,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.max_model_len,
        max_num_seqs=min(len(prompts), 16),
    )
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        if options.json:
            print(json.dumps(asdict(output), ensure_ascii=False))
        else:
            print(f"{output.prompt}{output.outputs[0].text}")
    return int(any(output.outputs[0].finish_reason == "error" for output in outputs))
