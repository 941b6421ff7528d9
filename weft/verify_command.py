"""`weft verify`: an engine on trial before HuggingFace, by laws; exit status 0 if every law that was judged holds.

With `--planted` it is the tests that are on trial, before planted faults.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.config import DTYPE_ALIASES, DTYPES, EngineConfig
from weft.errors import CheckpointNotFoundError, ConfigError
from weft.testing.engines import find_engine, known_engines
from weft.testing.prompts import STANDING_PROMPTS, read_prompts

if TYPE_CHECKING:
    from weft.models.checkpoint.interface import Checkpoint

# Standing prompts by default: short, long, a chat, other scripts. HuggingFace answers them one at a time.
_PROMPTS = ("one token", "facts", "a block and one", "python", "json", "chinese", "emoji", "chat, with system")
_ROOM = 512  # tokens beside the prompts' own: the laws ask for prompts of up to 300


def add_verify(commands: Any) -> None:
    """The command's own arguments, on a parser's subparsers."""
    parser = commands.add_parser(
        "verify",
        allow_abbrev=False,
        help="judge an engine",
        description="Judge an engine by laws: HuggingFace's tokens and ends, whatever runs beside a request.",
        epilog="example: weft verify smollm2-135m --engine hf-cb --dtype float32",
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="alias, folder, .gguf file or hub id")
    parser.add_argument(
        "--engine",
        default="weft",
        metavar="NAME",
        help=", ".join(known_engines()).replace("openai", "openai:URL")
        + "; or your own: ./my_engine.py, my_package.my_engine (%(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="%(default)s, as stored; float32 is judged by equality; one of " + ", ".join((*DTYPES, *DTYPE_ALIASES)),
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line (default: standing prompts)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="tokens a prompt at most (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_planted(parser)
    parser.set_defaults(run=_verify)


def _add_planted(parser: argparse.ArgumentParser) -> None:
    """What `pytest --planted` takes."""
    group = parser.add_argument_group("planted faults", "in a checkout of sources, instead of judging an engine")
    group.add_argument(
        "--planted",
        nargs="?",
        const="sample",
        metavar="all|N|NAME",
        help="plant faults in copies of the sources and see them killed: a sample, all, so many, one, or one part's",
    )
    group.add_argument("--planted-catalogue", metavar="MODULE:NAME", help="(tests.planted:CATALOGUE)")
    group.add_argument("--planted-seed", type=int, metavar="SEED", help="seed of the sample (today's date)")
    group.add_argument("--planted-jobs", type=int, metavar="N", help="faults at a time (one a core, two at most)")
    group.add_argument("--planted-json", type=Path, metavar="FILE", help="write every verdict to FILE")


def _plant(options: argparse.Namespace) -> int:
    from weft.testing.planted.command import DEFAULT_CATALOGUE, run_planted

    return run_planted(
        options.planted,
        root=Path.cwd(),
        catalogue=options.planted_catalogue or DEFAULT_CATALOGUE,
        seed=options.planted_seed,
        jobs=options.planted_jobs,
        json_file=options.planted_json,
    )


def _verify(options: argparse.Namespace) -> int:
    if options.planted is not None:
        return _plant(options)
    if options.max_new_tokens < 4:
        raise ConfigError(f"--max-new-tokens must be at least 4, got {options.max_new_tokens}")
    texts = None if options.prompts is None else list(read_prompts(options.prompts).values())
    config = EngineConfig.of(model=options.model, dtype=options.dtype, device=options.device)
    find_engine(options.engine)
    logging.getLogger("weft").setLevel(logging.WARNING)

    # Seconds to import: a wrong argument should not wait for them.
    from rich.console import Console

    from weft.inference.placement import place
    from weft.inference.startup import check_options
    from weft.models.checkpoint.source import open_checkpoint
    from weft.testing.engine_report import show_engine_report, try_engine
    from weft.testing.engines.interface import ModelUnderTest
    from weft.tokenizer.hub import HubTokenizer

    check_options(config)
    checkpoint = open_checkpoint(options.model)
    longest_possible = _longest_sequence(options.engine, checkpoint)
    placement = place(config.model, checkpoint.stored_dtype)
    try:
        tokenizer = HubTokenizer(checkpoint.tokenizer.folder, checkpoint.tokenizer.gguf_file)
    except CheckpointNotFoundError as error:
        hint = "prompts are texts here; run_engine_conformance takes token ids (docs/conformance.md)"
        raise CheckpointNotFoundError(error.message, hint=hint) from error
    if texts is None:
        standing = [prompt.content for prompt in STANDING_PROMPTS if prompt.name in _PROMPTS]
        texts = [content if isinstance(content, str) else tokenizer.chat(content) for content in standing]
    prompts = [tuple(tokenizer.encode(text)) for text in texts]
    longest = max(len(prompt) for prompt in prompts)
    if longest + options.max_new_tokens > longest_possible:
        raise ConfigError(
            f"a prompt of {longest} tokens and --max-new-tokens {options.max_new_tokens} exceed the model's "
            f"{longest_possible} positions"
        )
    model = ModelUnderTest(
        name=options.model,
        checkpoint=checkpoint,
        dtype=placement.dtype,
        device=placement.device,
        max_model_len=min(longest + options.max_new_tokens + _ROOM, longest_possible),
        dtype_is_given=options.dtype != "auto",
        tokenizer=tokenizer,
    )
    errors = Console(stderr=True)
    report = try_engine(
        options.engine,
        model,
        prompts,
        max_new_tokens=options.max_new_tokens,
        progress=lambda finding: errors.print(f"{finding.outcome.value}: {finding.law}", markup=False),
    )
    if options.json:
        print(report.as_json())
    else:
        show_engine_report(report, Console(width=None if sys.stdout.isatty() else 120))
    return 0 if report.passed else 1


def _longest_sequence(engine: str, checkpoint: "Checkpoint") -> int:
    """Tokens of the longest sequence of the model. Any model that HuggingFace knows will do, but for weft's own engine.

    Raises: UnknownModelTypeError and its kind where weft is to run what it cannot.
    """
    from weft.models.checkpoint.load import read_config

    if engine == "weft":
        return int(read_config(checkpoint).max_model_len)
    positions = checkpoint.config.get("max_position_embeddings")
    return positions if isinstance(positions, int) and positions > 0 else sys.maxsize
