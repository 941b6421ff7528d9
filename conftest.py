"""What every test of weft shares: shape annotations are checked, Hypothesis profiles, unset memory is NaN."""

import importlib
import os
import random
import zlib
from collections.abc import Iterator

import jaxtyping
import numpy
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.kernels.interpreter import hasten, multiply_by_rows

# Every public tensor annotation is enforced in the test run. `kernels` stays out: the hook breaks @triton.jit.
_CHECKED = [
    "batch",
    "layers",
    "attention",
    "models",
    "inference",
    "tokenizer",
    "llm",
    "output_processor",
    "outputs",
    "stop_strings",
    "text_engine",
    "testing",
    "benchmark",
]
jaxtyping.install_import_hook([f"weft.{name}" for name in _CHECKED], "beartype.beartype")

pytest_plugins = ["tests.nights"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on the network

# Without a GPU, kernels run in Triton's interpreter. Triton reads this when a kernel is defined, its own library's
# kernels when it is imported, so it has to be set before any test module is.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("dev", max_examples=50, stateful_step_count=30, deadline=None)
settings.register_profile("ci", max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)
# The same examples in every run, so that a planted fault is killed or not, and no time is spent to make them small.
settings.register_profile(
    "planted",
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.register_profile(
    "nightly",
    max_examples=5000,
    stateful_step_count=150,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_configure(config: pytest.Config) -> None:
    """The profile that was asked for; else `nightly` where -m is, `ci` under CI, `dev` at a desk."""
    _benchmark_alone(config)
    at_night = config.getoption("markexpr") == "nightly"
    default = "nightly" if at_night else "ci" if os.environ.get("CI") else "dev"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", default))


def _benchmark_alone(config: pytest.Config) -> None:
    """pytest-benchmark measures with --benchmark-only, in one process, and is silent otherwise."""
    if not hasattr(config.option, "benchmark_only"):
        return  # not installed: nothing asks for it
    if not config.option.benchmark_only:
        config.option.benchmark_skip = True
    elif hasattr(config.option, "dist"):
        config.option.dist, config.option.tx, config.option.numprocesses = "no", [], 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tables are for eyes: they are deselected unless --benchmark-only asks for them, and for nothing else."""
    if getattr(config.option, "benchmark_only", False):
        return
    tables = [item for item in items if "benchmark" in getattr(item, "fixturenames", ())]
    if tables:
        config.hook.pytest_deselected(items=tables)
        items[:] = [item for item in items if item not in tables]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny products wait for a second thread more than they gain by it: ten times as long where the cores are busy."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _interpreter_does_nothing_twice_and_multiplies_by_rows() -> None:
    """Here and not when a test first asks for a kernel: an engine may be the first to do so."""
    from weft.kernels._jit import HAS_TRITON, interpreting

    if HAS_TRITON and interpreting():
        interpreter = importlib.import_module("triton.runtime.interpreter")
        hasten(interpreter)
        multiply_by_rows(interpreter)


@pytest.fixture(autouse=True)
def _draws_by_name(request: pytest.FixtureRequest) -> None:
    """What is drawn without a seed is a test's own, whichever tests ran before it in its process.

    Python's too: beartype looks at one element of a list, and picks it by that.
    """
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the annotation checks of the test run, which would refuse a value before weft does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def _unset_memory_is_nan() -> Iterator[None]:
    """torch.empty comes back as NaN, so that a read of memory nobody wrote shows in the result."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
