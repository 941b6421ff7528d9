"""pytest-benchmark's tables run where --benchmark-only asks for them, in one process, and nowhere else."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hooks(pytestconfig: pytest.Config) -> Any:
    return pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))


def asked(**options: Any) -> Any:
    dropped: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    return SimpleNamespace(option=SimpleNamespace(**options), hook=hook, dropped=dropped)


@pytest.mark.parametrize("options", [{}, {"benchmark_only": False}, {"benchmark_only": True}])
def test_a_table_is_left_out_of_every_other_run(options: dict[str, bool], hooks: Any) -> None:
    table, law = SimpleNamespace(fixturenames=["benchmark"]), SimpleNamespace(fixturenames=["tmp_path"])
    items, config = [table, law, SimpleNamespace()], asked(**options)
    hooks.pytest_collection_modifyitems(config, items)
    is_asked = options.get("benchmark_only", False)
    assert (table in items) is is_asked
    assert law in items
    assert config.dropped == ([] if is_asked else [table])


def test_it_measures_in_one_process_and_is_silent_otherwise(hooks: Any) -> None:
    workers = {"dist": "loadscope", "tx": ["2*popen"], "numprocesses": 2}
    config = asked(benchmark_only=True, benchmark_skip=False, **workers)
    hooks._benchmark_alone(config)
    assert vars(config.option) == {"benchmark_only": True, "benchmark_skip": False} | {
        "dist": "no",
        "tx": [],
        "numprocesses": 0,
    }
    config = asked(benchmark_only=False, benchmark_skip=False, **workers)
    hooks._benchmark_alone(config)
    assert vars(config.option) == {"benchmark_only": False, "benchmark_skip": True} | workers
    config = asked(**workers)
    hooks._benchmark_alone(config)
    assert vars(config.option) == workers


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed")
def test_a_table_of_each_part_of_the_host() -> None:
    command = [sys.executable, "-m", "pytest", "tests/perf", "--benchmark-only", "--benchmark-columns=median"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "benchmark: 8 tests" in run.stdout
    assert "8 passed" in run.stdout
