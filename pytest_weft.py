"""The pytest plugin's entry point: options and markers only. Imports weft when a test needs it, not before."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weft", "verification of inference engines")
    group.addoption(
        "--require-gpu", action="store_true", help="fail where a test marked gpu would be skipped for want of a GPU"
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "gpu: needs a CUDA device",
        "perf: measures speed",
        "slow: takes more than half a minute",
        "nightly: long fuzzing, outside the default run",
    ):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError(f"--require-gpu, and torch sees no GPU for {len(marked)} tests")
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
