"""The pytest plugin's entry point: options, markers and fixtures. Imports weft when a test needs it, not before."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

_ENGINES = ("weft", "hf", "hf-cb")  # judged where none is named


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weft", "verification of inference engines")
    group.addoption(
        "--require-gpu", action="store_true", help="fail where a test marked gpu would be skipped for want of a GPU"
    )
    group.addoption(
        "--engine",
        action="append",
        metavar="NAME",
        help="judge this engine, and run the tests alone that can: weft, hf, hf-cb, vllm, openai:URL, ./my_engine.py, "
        "my_package.my_engine; may be given again",
    )
    group.addoption("--engine-model", metavar="MODEL", help="the model that it serves (default: a tiny one)")
    group.addoption("--engine-dtype", metavar="DTYPE", help="what it computes in, where it cannot be told (a server)")
    group.addoption(
        "--planted",
        nargs="?",
        const="sample",
        metavar="all|N|NAME",
        help="plant faults in copies of the sources and see them killed, instead of running tests: a sample of the "
        "catalogue, all of it, so many, one, or those of one part",
    )
    group.addoption("--planted-seed", type=int, metavar="SEED", help="seed of the sample (today's date)")
    group.addoption("--planted-jobs", type=int, metavar="N", help="faults at a time (one a core, two at most)")
    group.addoption("--planted-json", type=Path, metavar="FILE", help="write every verdict to FILE")
    group.addoption(
        "--modal",
        nargs="?",
        const="H100!",
        metavar="GPU",
        help="run the tests marked gpu on a GPU of Modal's (H100!), and the others here; name files before it, or "
        "write --modal=GPU",
    )
    group.addoption(
        "--weft-runner",
        choices=("modal", "subprocess", "inline"),
        help="who runs the tests marked gpu: Modal, a process of its own (weft_remote_command), or this process",
    )
    parser.addini(
        "weft_remote_command", "what --weft-runner=subprocess starts, if not this Python, here", type="args", default=[]
    )
    parser.addini("weft_planted", "catalogue of planted faults, module:name", default="tests.planted:CATALOGUE")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    asked = config.getoption("--planted")
    if asked is None:
        return None
    from weft.errors import WeftError
    from weft.testing.planted.command import run_planted

    try:
        return run_planted(
            asked,
            root=config.rootpath,
            catalogue=config.getini("weft_planted"),
            seed=config.getoption("--planted-seed"),
            jobs=config.getoption("--planted-jobs"),
            json_file=config.getoption("--planted-json"),
        )
    except WeftError as error:
        raise pytest.UsageError(str(error)) from error
    except KeyboardInterrupt:
        print("\ninterrupted: nothing is said of faults without a verdict")
        return pytest.ExitCode.INTERRUPTED


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "gpu: needs a CUDA device",
        "perf: measures speed",
        "slow: takes more than half a minute",
        "engine: judges any engine, by the fixture engine_name; all that runs where --engine names one",
    ):
        config.addinivalue_line("markers", marker)
    if config.getoption("--engine"):
        _check_engines(config.getoption("--engine"))
    if _goes_elsewhere(config):
        _send_elsewhere(config)


def _check_engines(names: list[str]) -> None:
    """An unknown name is an error of the command line, not of each test that it would run for."""
    from weft.errors import WeftError
    from weft.testing.engines import check_name

    try:
        for name in names:
            check_name(name)
    except WeftError as error:
        raise pytest.UsageError(f"--engine: {error}") from error


def _goes_elsewhere(config: pytest.Config) -> bool:
    return config.getoption("--modal") is not None or config.getoption("--weft-runner") is not None


def _send_elsewhere(config: pytest.Config) -> None:
    """Replace the loop over tests. xdist's workers would have no part in it: off, unless it was asked for by hand."""
    if hasattr(config, "workerinput"):
        return
    given = config.invocation_params.args
    xdist = [argument for argument in given if str(argument).startswith(("-n", "--numprocesses", "--dist", "--tx"))]
    if xdist and getattr(config.option, "dist", "no") != "no":
        raise pytest.UsageError(f"{xdist[0]} and --modal (or --weft-runner) exclude each other")
    if hasattr(config.option, "dist"):
        config.option.dist, config.option.tx, config.option.numprocesses = "no", [], 0
    from weft.errors import WeftError
    from weft.testing.remote.session import register

    try:
        register(config)
    except WeftError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_to_engines(config, items)
    _skip_without_gpu(config, items)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked `engine` that takes `engine_name` runs for each engine that was asked for.

    One that is not marked may mean anything by that name.
    """
    if "engine_name" in metafunc.fixturenames and metafunc.definition.get_closest_marker("engine"):
        names = metafunc.config.getoption("--engine") or _ENGINES
        metafunc.parametrize("engine_name", names, scope="module")


def _leave_to_engines(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where an engine is named, deselect what does not judge it."""
    if not config.getoption("--engine"):
        return
    others = [item for item in items if not item.get_closest_marker("engine")]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _skip_without_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    is_elsewhere = _goes_elsewhere(config) and config.getoption("--weft-runner") != "inline"
    if not marked or is_elsewhere:
        return
    import torch

    if torch.cuda.is_available():
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError(f"--require-gpu, and torch sees no GPU for {len(marked)} tests")
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.fixture
def _counts(request: pytest.FixtureRequest) -> Iterator[Callable[[str, int], None]]:
    """Sums what the tiers counted in a test; they become its properties (`weft_ties`, ...), in junit's XML too."""
    counts: Counter[str] = Counter()

    def record(name: str, count: int) -> None:
        counts[name] += count

    yield record
    # Not by `record_property`: where junit's family is the default one it warns of itself, an error in strict suites.
    request.node.user_properties += [(f"weft_{name}", count) for name, count in sorted(counts.items())]


@pytest.fixture
def assert_token_exact(_counts: Callable[[str, int], None]) -> Callable[..., Any]:
    """`weft.testing.assert_token_exact` (tier A), counting positions and excused ties as properties of the test."""
    from weft.testing.exactness import assert_token_exact as judge

    return partial(judge, record=_counts)


@pytest.fixture
def assert_bitwise(_counts: Callable[[str, int], None]) -> Callable[..., None]:
    """`weft.testing.assert_bitwise` (tier B), counting compared values as a property of the test."""
    from weft.testing.bitwise import assert_bitwise as judge

    return partial(judge, record=_counts)


@pytest.fixture
def audit_near_ties(_counts: Callable[[str, int], None]) -> Callable[..., Any]:
    """`weft.testing.audit_near_ties` (tier C), counting positions and flips, excused or not, as properties."""
    from weft.testing.near_ties import audit_near_ties as judge

    return partial(judge, record=_counts)
