"""The marker `nightly` of this repository's tests. No part of the plugin: another project's nights are its own."""

from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "nightly: long fuzzing and whole products; runs only where -m or a node id asks for it"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is marked nightly, unless `-m` speaks of it or it is named by its node id."""
    if "nightly" in config.getoption("markexpr", ""):
        return
    named = tuple(_named(config))
    nights = [item for item in items if item.get_closest_marker("nightly") and not item.nodeid.startswith(named)]
    if nights:
        config.hook.pytest_deselected(items=nights)
        items[:] = [item for item in items if item not in nights]


def _named(config: pytest.Config) -> Iterator[str]:
    """Node ids on the command line, where files are written from the working directory, as from the root."""
    for argument in config.args:
        file, colons, rest = argument.partition("::")
        path = (config.invocation_params.dir / file).resolve()
        if colons and path.is_relative_to(config.rootpath):
            yield f"{path.relative_to(config.rootpath).as_posix()}::{rest}"
