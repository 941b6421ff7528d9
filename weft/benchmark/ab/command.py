"""`weft bench ab BASE HEAD`: options from the command line, the table to the screen, the verdict as exit status."""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

from weft.config import DTYPE_ALIASES, DTYPES, ModelConfig
from weft.errors import ConfigError
from weft.options import positive, writable

_EXAMPLES = """\
examples:
  weft bench ab main                          HEAD against where it left main
  weft bench ab main .                        with the changes that are not committed
  weft bench ab v1 v2 --exact --device cuda --dtype bfloat16 --batch 32 --json results/ab.jsonl
  weft bench ab main --workload speed.py      another workload: a file with `build(options)`, of any project

exit status: 0 not slower, 1 slower, 3 inconclusive, 4 instrument broken, 2 an error"""


def add_ab(commands: Any) -> None:
    """Add the command `ab` to an argparse object of sub-commands."""
    parser = commands.add_parser(
        "ab",
        allow_abbrev=False,
        help="whether one commit is slower than another, on this machine",
        description="Run a workload of two commits by turns, each in a process of its own, beside two controls: the "
        "base against itself, which must show nothing, and the base with 10 %% of work added, which must show.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("base", metavar="BASE", help="a commit, branch or tag")
    add("head", metavar="HEAD", nargs="?", default="HEAD", help="another, or . for the working tree (%(default)s)")
    add("--exact", action="store_true", help="take BASE itself, not the commit at which HEAD left it")
    add("--repository", type=Path, default=Path(), metavar="FOLDER", help="of both commits (the current folder)")
    add("--workload", type=Path, metavar="FILE", help="a Python file with build(options) (prefill and decode of weft)")
    add("--package", default="weft", help="must be imported from the commit's own tree; '' asks nothing (%(default)s)")
    add("--model", default="smollm2-135m", help="alias, folder, .gguf file or hub id (%(default)s)")
    add("--device", default="cpu", help="auto, cpu, cuda or cuda:N (%(default)s)")
    add("--dtype", default="float32", help="one of " + ", ".join((*DTYPES, *DTYPE_ALIASES)) + " (%(default)s)")
    add("--batch", type=int, default=2, help="requests of a turn (%(default)s)")
    add("--prompt-tokens", type=int, default=32, help="of each request (%(default)s)")
    add("--output-tokens", type=int, default=5, help="of each request (%(default)s)")
    add("--threads", type=int, default=1, help="of torch on a CPU: several wait for each other (%(default)s)")
    add("--engine", default="{}", metavar="JSON", help="more fields of weft's engine (%(default)s)")
    add("--blocks", type=int, default=32, help="of eight turns: two of each arm (%(default)s)")
    add("--threshold", type=float, default=2.0, help="per cent that may go unnoticed (%(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds that a worker may take to start, or for a turn")
    add("--json", type=Path, metavar="FILE", help="append the result to FILE, a line with every turn in it")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)

    # Seconds to import: --help and a wrong argument should not wait for them.
    from weft.benchmark.ab.comparison import compare
    from weft.benchmark.ab.report import markdown, record
    from weft.benchmark.ab.schedule import Arm
    from weft.benchmark.ab.worker import Worker
    from weft.benchmark.ab.worktree import merge_base, trees
    from weft.benchmark.progress import show_bars, show_nothing
    from weft.benchmark.provenance import Provenance
    from weft.benchmark.row import append_line
    from weft.inference.placement import place

    progress = show_bars if sys.stderr.isatty() else show_nothing
    workload = arguments.workload or Path(__file__).with_name("serving.py")
    options = {name: getattr(arguments, name) for name in ("model", "device", "dtype", "batch", "engine", "threads")}
    options |= {"prompt_tokens": arguments.prompt_tokens, "output_tokens": arguments.output_tokens}
    threshold = arguments.threshold / 100
    base = arguments.base
    if not arguments.exact:
        base = merge_base(arguments.repository, base, arguments.head)
    provenance = Provenance.here(place(ModelConfig(model="-", device=arguments.device), None).device)
    with ExitStack() as stack:
        base_tree, head_tree = stack.enter_context(trees(arguments.repository, base, arguments.head))
        advance = progress("workers", 3)
        workers = {}
        for arm, tree in ((Arm.BASE, base_tree), (Arm.HEAD, head_tree), (Arm.CONTROL, base_tree)):
            how = {"workload": workload.resolve(), "package": arguments.package, "timeout_s": arguments.timeout}
            workers[arm] = stack.enter_context(Worker.of(arm, tree.path, options=options, **how))
            advance()
        comparison = compare(
            workers, blocks=arguments.blocks, threshold=threshold, advance=progress("blocks", arguments.blocks)
        )
    print(markdown(comparison, base_tree, head_tree, threshold=threshold, provenance=provenance))
    if arguments.json is not None:
        how = options | {"blocks": arguments.blocks, "threshold": threshold, "workload": workload.name}
        line = record(comparison, base_tree, head_tree, options=how, provenance=provenance)
        append_line(line, arguments.json)
    return comparison.verdict.exit_status


def _check(arguments: argparse.Namespace) -> None:
    """Raises: ConfigError."""
    numbers = ("batch", "prompt_tokens", "blocks", "threads")
    positive("ab", **{name: getattr(arguments, name) for name in numbers})
    if arguments.blocks < 8:
        raise ConfigError(f"--blocks {arguments.blocks} are too few for an interval", hint="8 or more")
    if arguments.output_tokens < 2:
        raise ConfigError(f"--output-tokens {arguments.output_tokens} leaves nothing to decode", hint="2 or more")
    if not 0 < arguments.threshold < 5:
        raise ConfigError(
            f"--threshold {arguments.threshold:g} is not between 0 and 5",
            hint="per cent, less than half of the planted 10",
        )
    if not 0 < arguments.timeout <= TIMEOUT_MAX:
        raise ConfigError(f"--timeout {arguments.timeout:g} is no time to wait", hint="seconds, 600 for instance")
    writable("--json", arguments.json)
    if arguments.workload is not None and not arguments.workload.is_file():
        hint = "a Python file with build(options); docs/speed_gates.md"
        raise ConfigError(f"--workload {arguments.workload} is no file", hint=hint)
    try:
        if not isinstance(json.loads(arguments.engine), dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--engine {arguments.engine} is no JSON object", hint='{"enforce_eager": true}') from error
