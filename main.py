"""uv run main.py: weft against HuggingFace generate, token for token, on a real model; exit status 0 if they agree."""

import argparse
import logging
import sys
from pathlib import Path
from uuid import uuid4

from weft.cli import exit_status
from weft.config import DTYPE_ALIASES, DTYPES, EngineConfig
from weft.errors import ConfigError, RequestError
from weft.options import writable
from weft.testing.prompts import STANDING_PROMPTS, read_prompts
from weft.testing.remote.gpu_names import DEFAULT_GPU, checked_gpu


def main() -> int:
    options = _options()
    verify = _verify if options.modal is None else _verify_on_modal
    run = verify if options.collect is None else _collect
    return exit_status("main.py", lambda: run(options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Compare weft with HuggingFace generate: token ids, lengths, finish reasons, logits of every step.",
        epilog="float32 must agree exactly (tier A); bfloat16 and float16 are audited for near-ties (tier C).",
    )
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder, .gguf file or hub id (%(default)s)")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt a line; a line that is a JSON string is "
        "decoded, blank lines are skipped (default: 32 standing prompts)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens a prompt at most (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="%(default)s; one of " + ", ".join((*DTYPES, *DTYPE_ALIASES)))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="order in which weft is given the prompts (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict and every row to FILE")
    parser.add_argument(
        "--modal", nargs="?", const=DEFAULT_GPU, metavar="GPU", help=f"run on a GPU of Modal's ({DEFAULT_GPU})"
    )
    parser.add_argument(
        "--collect",
        nargs="?",
        const="",
        metavar="EXPERIMENT",
        help="measure instead: an experiment of `weft bench`, or all, into rows under results/ (or --json FILE)",
    )
    options = parser.parse_args()
    if options.collect is not None:
        for name in ("model", "prompts", "max_new_tokens", "dtype", "seed"):
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} belongs to the check; `weft bench` has options of its own")
    return options


def _collect(options: argparse.Namespace) -> int:
    from weft.benchmark.collection import Desk, chosen, collect
    from weft.benchmark.progress import show_bars, show_nothing

    experiments = chosen(options.collect)
    root = Path(__file__).resolve().parent
    folder = root / "results"
    if options.json is None:
        folder.mkdir(exist_ok=True)
        # As good as any: which device it will be is not known yet.
        writable("--json is left out, and", folder / "cpu.jsonl")
    writable("--json", options.json)
    progress = show_bars if sys.stderr.isatty() else show_nothing
    where = {"device": options.device, "folder": folder, "file": options.json}
    if options.modal is None:
        return collect(list(experiments), Desk(experiments, **where).measure, progress)
    gpu = checked_gpu(options.modal)

    from weft.benchmark.remote_collection import RemoteDesk
    from weft.testing.remote.modal_runner import ModalRunner

    runner = ModalRunner(root, gpu, may_fetch=True)
    runner.open()
    try:
        return collect(list(experiments), RemoteDesk(runner, **where).measure, progress)
    finally:
        runner.close()


def _verify_on_modal(options: argparse.Namespace) -> int:
    gpu = checked_gpu(options.modal)
    _check(options)
    root = Path(__file__).resolve().parent
    names = ("model", "max_new_tokens", "dtype", "device", "seed")
    arguments = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    if options.prompts is not None:
        read_prompts(options.prompts)
        arguments.append(f"--prompts={_in_the_tree(options.prompts, root)}")

    from weft.testing.remote.modal_runner import ModalRunner
    from weft.testing.remote.program import run_program

    brings = {}
    if options.json is not None:
        there = f"results/verdict-{uuid4().hex}.json"  # a name of its own: a file that is there already is no verdict
        arguments.append(f"--json={there}")
        brings[there] = options.json
    return run_program(ModalRunner(root, gpu, may_fetch=True), ["main.py", *arguments], brings=brings)


def _in_the_tree(file: Path, root: Path) -> Path:
    """A file as it is named on the other machine. Raises: ConfigError for one that does not travel."""
    from weft.testing.remote.modal_runner import left_out

    if not file.resolve().is_relative_to(root) or left_out(root)(file.resolve().relative_to(root)):
        raise ConfigError(
            f"--prompts: {file} does not travel to Modal, where only files of the project go that git does not ignore",
            hint=f"copy it into {root}",
        )
    return file.resolve().relative_to(root)


def _check(options: argparse.Namespace) -> None:
    """What is wrong whatever the machine: told before one is asked for. Raises: ConfigError."""
    if options.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    writable("--json", options.json)
    EngineConfig.of(model=options.model, dtype=options.dtype, device=options.device, seed=options.seed)


def _verify(options: argparse.Namespace) -> int:
    _check(options)
    texts = None if options.prompts is None else read_prompts(options.prompts)
    logging.basicConfig(level=logging.ERROR)

    # Seconds to import: a wrong argument should not wait for them.
    from rich.console import Console

    from weft.models.checkpoint.load import read_config
    from weft.models.checkpoint.source import open_checkpoint
    from weft.testing.report import show_progress, show_table, verdict_line, write_json
    from weft.testing.verify import NamedPrompt, verify
    from weft.tokenizer.hub import HubTokenizer

    checkpoint = open_checkpoint(options.model)
    read_config(checkpoint)
    tokenizer = HubTokenizer(checkpoint.tokenizer.folder, checkpoint.tokenizer.gguf_file)
    named = texts or {
        prompt.name: prompt.content if isinstance(prompt.content, str) else tokenizer.chat(prompt.content)
        for prompt in STANDING_PROMPTS
    }
    prompts = []
    for name, text in named.items():
        try:
            prompts.append(NamedPrompt(name=name, token_ids=tuple(tokenizer.encode(text))))
        except RequestError as error:
            raise RequestError(f"prompt {name!r}: {error.message}", hint=error.hint) from error
    longest = max(len(prompt.token_ids) for prompt in prompts)
    config = EngineConfig.of(
        model=options.model,
        dtype=options.dtype,
        device=options.device,
        seed=options.seed,
        max_model_len=longest + options.max_new_tokens,
        max_num_seqs=min(len(prompts), 32),
    )
    result = verify(config, checkpoint, prompts, max_new_tokens=options.max_new_tokens, progress=show_progress)
    console = Console(width=None if sys.stdout.isatty() else 120)
    show_table(result, console)
    print(verdict_line(result))
    if options.json is not None:
        write_json(result, options.json)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
