"""The runner on a project of a few lines: every verdict for real, and the project as it was."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from weft.cli import main
from weft.errors import ConfigError
from weft.testing.planted.command import run_planted
from weft.testing.planted.fault import Catalogue, Fault
from weft.testing.planted.runner import Run, run

pytest_plugins = ["pytester"]

FILES = {
    "shop/__init__.py": "",
    "shop/price.py": (
        "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result\n\n\n"
        "def half(number):\n    return number // 2\n"
    ),
    "tests/conftest.py": (
        "import pytest\nfrom shop.price import half\n\n@pytest.fixture\ndef four():\n"
        "    assert half(8) == 4\n    return 4\n"
    ),
    "tests/test_price.py": (
        "import subprocess, sys\nfrom shop.price import half, total\n\n"
        "def test_total():\n    assert total([1, 2]) == 3\n\n"
        "def test_nothing():\n    assert total([]) == 0\n\n"
        "def test_half(four):\n    assert half(four) == 2\n\n"
        "def test_elsewhere():\n    code = 'from shop.price import total; print(total([1, 2]))'\n"
        "    assert subprocess.check_output([sys.executable, '-c', code]).strip() == b'3'\n"
    ),
}
TESTS = "tests/test_price.py"


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def planted(name: str, old: str, new: str, *killers: str, file: str = "shop/price.py", **more: str) -> Fault:
    return Fault(name=name, file=file, old=old, new=new, why="", tier="tests", killers=killers, **more)  # type: ignore[arg-type]


def catalogue_of(*faults: Fault, timeout_s: float = 300.0, **environment: str) -> Catalogue:
    return Catalogue(
        parts={"shop": faults},
        sources=("shop", "tests"),
        environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        timeout_s=timeout_s,
    )


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


ADD = "result += price"
EXPECTED = {
    "killed": planted("killed", ADD, "result = price", f"{TESTS}::test_total"),
    "killed by a process that a test starts": planted("elsewhere", ADD, "result = price", f"{TESTS}::test_elsewhere"),
    "survived": planted("survived", ADD, "result = price", f"{TESTS}::test_nothing"),
    "survived, as it must": planted(
        "equivalent", ADD, "result = price + result", f"{TESTS}::test_total", expect="survives"
    ),
    "wrong killer": planted("wrong", ADD, "result = price", f"{TESTS}::test_total", f"{TESTS}::test_nothing"),
    "invalid: no Python": planted("syntax", ADD, "result +=", f"{TESTS}::test_total"),
    "invalid: no name": planted("name", ADD, "result += prize", f"{TESTS}::test_total"),
    "invalid: in a fixture": planted("fixture", "number // 2", "number", f"{TESTS}::test_half"),
    "invalid: the process ends": planted("exit", ADD, "import os; os._exit(1)", f"{TESTS}::test_total"),
    "stale: gone": planted("gone", "result -= price", "result += 1", f"{TESTS}::test_total"),
    "stale: twice": planted("twice", "result", "outcome", f"{TESTS}::test_total"),
    "stale: no file": planted("no file", "a", "b", f"{TESTS}::test_total", file="shop/cost.py"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str], dict[str, bytes], dict[str, bytes]]:
    root = write(tmp_path_factory.mktemp("project"), FILES)
    before, told = contents(root), []
    # As an editable install has it: the original can be imported by whoever does not look first in the copy.
    catalogue = catalogue_of(*EXPECTED.values(), PYTHONPATH=str(root))
    result = run(catalogue, catalogue.faults, root, jobs=2, on_verdict=lambda verdict: told.append(verdict.fault.name))
    return result, told, before, contents(root)


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_verdict_is_given(done: tuple[Run, ...], kind: str) -> None:
    verdict = next(verdict for verdict in done[0].verdicts if verdict.fault == EXPECTED[kind])
    assert verdict.kind == kind.partition(":")[0].partition(" by ")[0].partition(",")[0], verdict.detail


def test_a_test_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    """In a run of its own: a limit that is soon over would be over for tests that end, too, on a busy machine."""
    loop = planted("endless", ADD, "import time; time.sleep(999)", f"{TESTS}::test_total")
    catalogue = catalogue_of(loop, timeout_s=1.0)
    result = run(catalogue, catalogue.faults, write(tmp_path, FILES), jobs=1)
    assert [verdict.kind for verdict in result.verdicts] == ["timed out"]
    assert result.exit_status == 1, "the tests fell short"


def test_a_run_is_as_good_as_its_worst_verdict_and_tells_each_once(done: tuple[Run, list[str]]) -> None:
    result, told = done[:2]
    assert result.baseline is None
    assert result.exit_status == 2, "stale and invalid ones are errors"
    assert sorted(told) == sorted(fault.name for fault in EXPECTED.values())
    assert [verdict.fault for verdict in result.verdicts] == list(EXPECTED.values())


def test_the_original_is_only_read(done: tuple[Run, list[str], dict[str, bytes], dict[str, bytes]]) -> None:
    assert done[2] == done[3]


def test_tests_that_fail_without_a_fault_judge_nothing(tmp_path: Path) -> None:
    broken = FILES | {"tests/test_price.py": "def test_total():\n    assert False, 'broken before'\n"}
    root = write(tmp_path, broken)
    catalogue = catalogue_of(EXPECTED["killed"])
    result = run(catalogue, catalogue.faults, root, jobs=1)
    assert (result.exit_status, result.verdicts) == (2, ())
    assert "broken before" in str(result.baseline)


def test_a_killer_that_does_not_run_kills_nothing(tmp_path: Path) -> None:
    skipped = "import pytest\n@pytest.mark.skip\ndef test_total(): ...\ndef test_nothing(): ...\n"
    root = write(tmp_path, FILES | {"tests/test_price.py": skipped})
    faults = catalogue_of(EXPECTED["killed"], EXPECTED["survived"])
    result = run(faults, faults.faults, root, jobs=1)
    assert result.baseline == f"tests that do not run here can kill nothing: {TESTS}::test_total"


def test_tests_that_import_the_original_are_found_out(tmp_path: Path) -> None:
    astray = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom shop.price import total\n"
    root = write(tmp_path, FILES | {"tests/conftest.py": "", "tests/test_price.py": astray + "def test_total(): ...\n"})
    catalogue = catalogue_of(EXPECTED["killed"])
    result = run(catalogue, catalogue.faults, root, jobs=1)
    assert result.exit_status == 2
    assert "imported from outside the copy: shop" in str(result.baseline)


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    catalogue = catalogue_of(EXPECTED["killed"])
    with pytest.raises(ConfigError, match="shop"):
        run(catalogue, catalogue.faults, tmp_path)


CATALOGUE = """
from weft.testing.planted.fault import Catalogue, Fault
CATALOGUE = Catalogue(
    parts={"sums": [Fault(name="a sum", file="shop/price.py", old="result += price", new="result = price", why="why",
                          tier="tests", killers=("tests/test_price.py::test_total",))],
           "empty": [Fault(name="no sum", file="shop/price.py", old="result += price", new="result = price", why="why",
                           tier="tests", killers=("tests/test_price.py::test_nothing",))]},
    sources=("shop", "tests"), environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
"""


def test_pytest_plants_what_it_is_asked_for(pytester: pytest.Pytester) -> None:
    write(pytester.path, FILES | {"shop_faults.py": CATALOGUE})
    pytester.makeini("[pytest]\nweft_planted = shop_faults:CATALOGUE")
    result = pytester.runpytest_subprocess("--planted=sums", "--planted-json=found.json", "--planted-seed=7")
    result.stdout.fnmatch_lines(
        ["1 of 2 planted faults, seed 7, *", "*killed*a sum", "1 of 1 planted faults killed, *"]
    )
    assert result.ret == 0
    found = json.loads((pytester.path / "found.json").read_text())
    assert (found["seed"], found["catalogue"], found["exit_status"]) == (7, 2, 0)
    assert [(row["part"], row["verdict"]) for row in found["faults"]] == [("sums", "killed")]


def test_weft_verify_plants_too_and_a_survivor_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, FILES | {"shop_of_survivors.py": CATALOGUE})
    monkeypatch.chdir(tmp_path)
    asked = ["--planted=all", "--planted-catalogue=shop_of_survivors:CATALOGUE", "--planted-jobs=1"]
    assert main(["verify", *asked]) == 1
    shown = capsys.readouterr().out
    assert "survived: no sum (shop/price.py)" in shown
    assert "1 of 2 planted faults killed" in shown


def test_a_run_that_is_ended_leaves_no_copies_and_no_test_at_work(tmp_path: Path) -> None:
    mark, shown, scratch = tmp_path / "mark", tmp_path / "shown", tmp_path / "scratch"
    scratch.mkdir()
    endless = (
        "import os, time\nfrom pathlib import Path\nfrom shop.price import total\n\n"
        f"def test_total():\n    if total([1, 2]) != 3:\n        Path({str(mark)!r}).write_text(f'{{os.getpid()}}.')\n"
        "        time.sleep(30)\n"
    )
    root = write(tmp_path / "project", FILES | {"shop_faults.py": CATALOGUE, "tests/test_price.py": endless})
    (root / "pytest.ini").write_text("[pytest]\nweft_planted = shop_faults:CATALOGUE")
    with (
        shown.open("w") as output,
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "--planted=a sum", "--planted-jobs=1"],
            cwd=root,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdout=output,
            stderr=output,
        ) as process,
    ):
        deadline = time.monotonic() + 60
        while not (mark.exists() and mark.read_text().endswith(".")):
            assert process.poll() is None, shown.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM, shown.read_text()
    assert list(scratch.iterdir()) == []
    assert "Traceback" not in shown.read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()[:-1]), 0)


def test_copies_are_removed_whatever_signal_comes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, cleanup = [], tempfile.TemporaryDirectory.cleanup

    def watched(folder: tempfile.TemporaryDirectory[str]) -> None:
        heard.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
        cleanup(folder)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", watched)
    catalogue = catalogue_of(EXPECTED["killed"])
    with pytest.raises(ConfigError):  # there is nothing to be copied
        run(catalogue, catalogue.faults, tmp_path)
    assert heard == [signal.SIG_IGN, signal.SIG_IGN]


@pytest.mark.parametrize("catalogue", ["no_such_module:CATALOGUE", "weft.errors:CATALOGUE", "weft.errors:WeftError"])
def test_a_catalogue_that_is_none_is_named(tmp_path: Path, catalogue: str) -> None:
    with pytest.raises(ConfigError, match=catalogue):
        run_planted("all", root=tmp_path, catalogue=catalogue)


def test_bad_arguments_are_named_before_anything_is_planted(tmp_path: Path) -> None:
    for wrong, what in (({"jobs": 0}, "jobs=0"), ({"json_file": tmp_path}, "is a folder")):
        with pytest.raises(ConfigError, match=what):
            run_planted("all", root=tmp_path, catalogue="tests.planted:CATALOGUE", **wrong)  # type: ignore[arg-type]
