"""What the repository promises of itself: small files, no drawers for leftovers, tests that are tests."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("weft/**/*.py"), *ROOT.glob("tests/**/*.py")])
TESTS = [source for source in SOURCES if source.name.startswith("test_") and ROOT / "tests" in source.parents]
MOST_LINES = 400
DECISIONS = ("scheduler", "policies.static", "block_allocator", "plan", "request", "sampling_params")


def name_of(source: Path) -> str:
    return str(source.relative_to(ROOT))


def collected(module: ast.Module | ast.ClassDef) -> Iterator[str]:
    """What pytest would find: test functions, those of test classes, and Hypothesis state machines."""
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                yield name
            case ast.ClassDef(name=name, bases=[ast.Attribute(attr="TestCase")]) if name.startswith("Test"):
                yield name
            case ast.ClassDef(name=name) if name.startswith("Test"):
                yield from collected(node)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase")) if name.startswith(
                "Test"
            ):
                yield name


def test_no_file_is_long() -> None:
    lengths = {name_of(source): len(source.read_text(encoding="utf-8").splitlines()) for source in SOURCES}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_every_test_file_holds_a_test() -> None:
    modules = {name_of(source): ast.parse(source.read_text(encoding="utf-8")) for source in TESTS}
    assert [name for name, module in modules.items() if not list(collected(module))] == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def helper(): ...\nclass Machine: ...\ntest_data = 3\ndef tested(): ...", []),
        ("def test_one(): ...\nasync def test_two(): ...", ["test_one", "test_two"]),
        ("class TestPool:\n    def test_one(self): ...\n    def helper(self): ...", ["test_one"]),
        ("TestPool = PoolMachine.TestCase", ["TestPool"]),
        ("class TestPool(PoolMachine.TestCase):\n    settings = few", ["TestPool"]),
    ],
)
def test_tests_are_found_where_pytest_finds_them(code: str, names: list[str]) -> None:
    assert list(collected(ast.parse(code))) == names


def test_no_name_says_nothing() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [name_of(source) for source in SOURCES if drawers & {*source.relative_to(ROOT).parts, source.stem}] == []


def test_no_two_test_files_share_a_name() -> None:
    names = [source.stem for source in TESTS]
    assert len(set(names)) == len(names), "pytest imports test files by their bare names"


def test_the_lock_file_stays_out_of_the_repository() -> None:
    ignored = subprocess.run(["git", "check-ignore", "--quiet", "uv.lock"], cwd=ROOT, check=False)
    assert ignored.returncode == 0, "not ignored, or already tracked"


@pytest.mark.parametrize("module", DECISIONS)
def test_decisions_are_made_without_torch(module: str) -> None:
    heavy = ("torch", "triton", "numpy", "transformers")
    code = f"import sys, weft.inference.{module}; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.strip() == "[]"


def test_every_package_but_kernels_has_its_shapes_checked() -> None:
    assignments = [node for node in ast.parse((ROOT / "conftest.py").read_text()).body if isinstance(node, ast.Assign)]
    checked = next(ast.literal_eval(node.value) for node in assignments if ast.unparse(node.targets[0]) == "_CHECKED")
    packages = {init.parent.name for init in ROOT.glob("weft/*/__init__.py")}
    assert packages - {"kernels"} <= set(checked)
    assert "kernels" not in checked, "the import hook breaks @triton.jit"
    homes = {path.stem for path in ROOT.glob("weft/*") if path.suffix == ".py" or path.is_dir()}
    assert set(checked) <= homes, "a name that no module has checks nothing"
