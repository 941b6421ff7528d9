"""`pytest --planted` and `weft verify --planted`: thin shells around one function."""

import importlib
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from weft.errors import ConfigError
from weft.options import writable
from weft.testing.planted.choice import choose
from weft.testing.planted.fault import Catalogue
from weft.testing.planted.report import progress_line, show, summary, write_json
from weft.testing.planted.runner import run
from weft.testing.planted.verdict import Verdict

DEFAULT_CATALOGUE = "tests.planted:CATALOGUE"


def run_planted(
    asked: str,
    *,
    root: Path,
    catalogue: str = DEFAULT_CATALOGUE,
    seed: int | None = None,
    jobs: int | None = None,
    json_file: Path | None = None,
) -> int:
    """Plant what is asked for in copies of the tree at `root`; the exit status: 0 if all is as expected, 1, or 2.

    asked: see `choice.choose`.   catalogue: `module:name` of a Catalogue, importable from `root`.
    seed: of the sample; None takes the date, so that each day looks at others.   jobs: None is one a core, two at most.
    Raises: ConfigError for a catalogue or a name that is not there.
    """
    known = load_catalogue(catalogue, root)
    if seed is None:
        seed = int(datetime.now(UTC).strftime("%Y%m%d"))
    writable("--planted-json", json_file)
    faults = choose(known, asked, seed)
    jobs = min(os.cpu_count() or 1, 2) if jobs is None else jobs
    if jobs < 1:
        raise ConfigError(f"jobs={jobs} plants nothing", hint="a number from 1 on")
    console = Console(width=None if sys.stdout.isatty() else 120)
    print(f"{len(faults)} of {len(known.faults)} planted faults, seed {seed}, {jobs} at a time", flush=True)
    place = 0

    def tell(verdict: Verdict) -> None:
        nonlocal place
        place += 1
        print(progress_line(verdict, place, len(faults)), flush=True)

    result = run(known, faults, root, jobs=jobs, on_verdict=tell)
    show(result, known, console)
    print(summary(result))
    if json_file is not None:
        write_json(result, known, json_file, seed=seed)
    return result.exit_status


def load_catalogue(name: str, root: Path) -> Catalogue:
    """The catalogue `module:name`, its module under `root`. Raises: ConfigError if there is none."""
    module_name, _, attribute = name.partition(":")
    hint = "module:name of a weft.testing.planted.fault.Catalogue, in a checkout of the sources"
    sys.path.insert(0, str(root))
    try:
        found = getattr(importlib.import_module(module_name), attribute or "CATALOGUE")
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"no catalogue of planted faults at {name!r}: {error}", hint=hint) from error
    finally:
        sys.path.remove(str(root))
    if not isinstance(found, Catalogue):
        raise ConfigError(f"{name!r} is no catalogue", hint=hint)
    return found
