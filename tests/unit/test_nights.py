"""The marker `nightly` of this repository: left out unless it is asked for, by whatever path."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CODE = "import pytest\n@pytest.mark.nightly\ndef test_long(): ...\ndef test_short(): ..."


@pytest.fixture(autouse=True)
def _nights(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    folder = pytester.mkdir("inner")
    (folder / "test_nights.py").write_text(CODE)


@pytest.mark.parametrize(
    ("arguments", "passed", "deselected"),
    [
        ([], 1, 1),
        (["-m", "nightly"], 1, 1),
        (["-m", "not nightly"], 1, 1),
        (["-m", "nightly or not nightly"], 2, 0),
        (["test_nights.py::test_long"], 1, 0),
        (["./test_nights.py::test_long"], 1, 0),
        (["../inner/test_nights.py::test_long"], 1, 0),
        (["test_nights.py"], 1, 1),
    ],
    ids=str,
)
def test_nights_run_only_where_they_are_asked_for(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    passed: int,
    deselected: int,
) -> None:
    pytester.makeini("[pytest]")
    monkeypatch.chdir(pytester.path / "inner")
    pytester.runpytest("-p", "tests.nights", *arguments).assert_outcomes(passed=passed, deselected=deselected)
