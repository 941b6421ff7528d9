"""Engines are found by name, by file and by module; nothing is imported before it is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.testing.engines import find_engine, known_engines


def test_every_engine_of_the_folder_is_found_by_its_name() -> None:
    assert known_engines() == ["hf", "hf-cb", "openai", "vllm", "weft"]
    factories = [find_engine(name)[0] for name in known_engines()]
    assert len(set(factories)) == len(factories)


def test_what_follows_the_colon_is_the_engines_own() -> None:
    assert find_engine("openai:http://127.0.0.1:1/v1")[1] == "http://127.0.0.1:1/v1"
    assert find_engine("hf")[1] is None


def test_an_engine_of_ones_own_is_a_file_or_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_engines").mkdir()
    own = tmp_path / "my_engines" / "mine.py"
    own.write_text("ENGINE = print")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_engine(str(own)) == (print, None)
    assert find_engine(f"{own}:8") == (print, "8")
    assert find_engine("my_engines.mine:8") == (print, "8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vlm", "did you mean 'vllm'"),
        ("./absent.py", r"no engine file ./absent.py"),
        ("./absent.py:8", r"no engine file ./absent.py"),
        ("no such.name", "an engine of your own is a file or a module"),
        ("absent.engine", "cannot be imported.*\nhint: it is looked for where Python looks"),
        ("json.tool", "defines no ENGINE"),
    ],
)
def test_an_unknown_engine_is_an_error_that_names_it(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_engine(name)


def test_names_cost_neither_torch_nor_an_engine() -> None:
    heavy = ("torch", "transformers", "vllm")
    ask = "import sys, weft.testing; from weft.testing.engines import known_engines; known_engines()"
    code = f"{ask}; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
