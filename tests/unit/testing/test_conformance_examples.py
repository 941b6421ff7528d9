"""The examples of docs/conformance.md are whole test files of another project, and each of their tests passes."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from weft import testing

PAGE = Path(__file__).parents[3] / "docs" / "conformance.md"
EXAMPLES = dict(re.findall(r"```python\n# (test_my_\w+)\.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_every_suite_has_an_example() -> None:
    suites = {name for name in testing.__all__ if name.startswith("run_")}
    assert len(suites) == 6
    assert suites == {
        name for name in suites if any(f" import {name}" in text or f", {name}" in text for text in EXAMPLES.values())
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes_as_it_stands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(EXAMPLES[name], "utf-8")
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    getattr(module, name)()
