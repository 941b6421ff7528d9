"""Every kernel builds and fits on every GPU it is meant for, and spills nothing on Hopper. Needs no GPU."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

import weft.kernels
from weft.kernels._jit import HAS_TRITON
from weft.kernels.specialisation import CAPABILITIES, sample, settings

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

ROOT = Path(weft.kernels.__file__).parents[2]
INFRASTRUCTURE = {"paged", "pieces", "specialisation"}
# A module that starts with an underscore is a part of another.
KERNELS = [
    name
    for _, name, _ in pkgutil.iter_modules(weft.kernels.__path__)
    if not name.startswith("_") and name not in INFRASTRUCTURE
]

# A form takes one to six seconds of one core to compile, and importing torch five: one process compiles them all.
TIMEOUT_S = 600


class Compiler:
    """A process where kernels are no Python functions, and what it said about each form of a module."""

    def __init__(self, folder: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weft.kernels.specialisation", "-"],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._known: dict[tuple[str, int, str], list[dict[str, Any]]] = {}

    def forms(self, module: str, capability: int, which: str = "launched") -> list[dict[str, Any]]:
        request = module, capability, which
        if request not in self._known:
            self._known[request] = self._ask(f"{module} {capability} {which}")
        return self._known[request]

    def _ask(self, request: str) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = Timer(TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            print(request, file=self.process.stdin, flush=True)
            lines = list(takewhile(lambda line: line != "\n", self.process.stdout))
        finally:
            timer.cancel()
        assert self.process.poll() is None, f"the compiling process ended at {request}"
        return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    """Of weft's kernels, and of those planted below."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "spilling.py").write_text(SPILLING)
    (folder / "untimely.py").write_text(UNTIMELY)
    started = Compiler(folder)
    with started.process:  # which ends with its standard input
        yield started


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_module_names_the_forms_it_launches(name: str) -> None:
    module = importlib.import_module(f"weft.kernels.{name}")
    names = [form.name for form in module.SPECIALISATIONS]
    assert names, "no form listed"
    assert len(names) == len(set(names)), "two forms of one name"


OTHERS = [capability for capability in CAPABILITIES if capability != 90]


def check(compiler: Compiler, name: str, capability: int, which: str) -> None:
    rows = compiler.forms(f"weft.kernels.{name}", capability, which)
    assert rows or which == "forced", f"nothing of {name} is meant for sm_{capability}"
    faults = [f"{row['name']} on sm_{capability}: {fault}" for row in rows for fault in row["faults"]]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", KERNELS)
def test_forms_of_every_setting_spill_nothing_on_hopper(compiler: Compiler, name: str) -> None:
    check(compiler, name, 90, "sample")


@pytest.mark.nightly
@pytest.mark.parametrize("name", KERNELS)
def test_every_form_that_is_launched_spills_nothing_on_hopper(compiler: Compiler, name: str) -> None:
    check(compiler, name, 90, "launched")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_sample_holds_every_value_of_every_setting(name: str, capability: int) -> None:
    forms = [form for form in importlib.import_module(f"weft.kernels.{name}").SPECIALISATIONS if not form.forced]
    forms = [form for form in forms if capability in form.capabilities]
    chosen = sample(forms)
    assert set().union(*map(settings, chosen)) == set().union(*map(settings, forms))
    assert len({form.name for form in chosen}) == len(chosen)


@pytest.mark.parametrize("capability", OTHERS)
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_builds_and_fits_elsewhere(compiler: Compiler, name: str, capability: int) -> None:
    check(compiler, name, capability, "first")


@pytest.mark.nightly
@pytest.mark.parametrize("capability", OTHERS)
@pytest.mark.parametrize("name", KERNELS)
def test_every_form_builds_and_fits_elsewhere(compiler: Compiler, name: str, capability: int) -> None:
    check(compiler, name, capability, "launched")


@pytest.mark.nightly
@pytest.mark.parametrize("name", KERNELS)
def test_forms_that_can_be_forced_spill_nothing_on_hopper(compiler: Compiler, name: str) -> None:
    check(compiler, name, 90, "forced")


def test_512_programs_of_decode_attention_run_at_once_on_an_h200(compiler: Compiler) -> None:
    """Its 132 multiprocessors hold four each: 65,536 registers, given out by 8 a thread, and 228 KiB, 1 of them taken.

    With three each, 512 programs of equal length take two turns, the second of which leaves most of the GPU idle.
    """
    for form in ("P64-n32w4s3-new-whole-early", "P64-n32w4s3-new-early", "P16-n32w4s3-new-early"):
        (row,) = compiler.forms("weft.kernels.paged_decode", 90, f"bf16-D128-{form}")
        places = 65_536 // (-(-row["registers"] // 8) * 8 * 128), 228 // (row["shared_bytes"] / 1024 + 1)
        assert min(places) >= 4, f"{row['name']}: {places}"


def row_sums(compiler: Compiler, kernel: str, which: str, part: str = "") -> set[int]:
    """How often the forms of this part in their names have threads sum a row."""
    found = {row["row_sums"] for row in compiler.forms(f"weft.kernels.{kernel}", 90, which) if part in row["name"]}
    assert found, f"no form of {kernel} is named {which} {part}"
    return found


def test_in_fixed_order_no_row_is_summed_by_threads(compiler: Compiler) -> None:
    """Which thread has which columns would decide the order; a product's is the same in every tile."""
    assert row_sums(compiler, "paged_prefill", "bf16-D128-P64-m128n64w8s3-split128") == {0}
    assert row_sums(compiler, "paged_decode", "bf16-D128-P64-n64w8s3-new-fixed-whole-early") == {0}
    assert 0 not in row_sums(compiler, "paged_decode", "bf16-D128-P64-n32w4s3-new-whole-early")
    assert 0 not in row_sums(compiler, "paged_prefill", "bf16-D128-P64-m128n64w8s3")


def test_threads_sum_a_row_alike_whether_its_planes_were_summed_or_not(compiler: Compiler) -> None:
    """In fixed order few rows leave planes and many their sum: one norm of either."""
    forms = ("planes4", "planes16", "planes1-summed")
    rows = [row for form in forms for row in compiler.forms("weft.kernels.add_norm", 90, f"bf16-E4096-{form}-early")]
    (layout,) = {tuple(row["sum_layouts"]) for row in rows}
    assert len(rows) == len(forms)
    assert len(layout) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(("kernel", "mark"), [("paged_prefill", "-split"), ("paged_decode", "-fixed")])
def test_in_no_form_of_fixed_order_is_a_row_summed_by_threads(compiler: Compiler, kernel: str, mark: str) -> None:
    assert row_sums(compiler, kernel, "forced", mark) | row_sums(compiler, kernel, "launched", mark) == {0}


def test_a_key_is_read_back_behind_a_barrier(compiler: Compiler) -> None:
    """Other threads load it than stored it, and the interpreter has but one: a GPU's form shows what holds them."""
    (row,) = compiler.forms("weft.kernels.paged_decode", 90, "bf16-D128-P64-n64w8s3-new-fixed-whole-early")
    assert reads_back_behind_a_barrier(row)


@pytest.mark.nightly
def test_in_every_form_a_key_is_read_back_behind_a_barrier(compiler: Compiler) -> None:
    rows = compiler.forms("weft.kernels.paged_decode", 90, "forced")
    writing = [row for row in rows if "-new-fixed" in row["name"] and "-shares" not in row["name"]]
    assert writing
    assert [row["name"] for row in writing if not reads_back_behind_a_barrier(row)] == []


def reads_back_behind_a_barrier(row: dict[str, Any]) -> bool:
    """Whether the first thing that is stored, a key with its value, is."""
    first = row["memory"].index("store")
    found: list[str] = row["memory"][first : first + 3]
    return found == ["store", "barrier", "load"]


SPILLING = """
from weft.kernels._jit import jit, tl
from weft.kernels.specialisation import Specialisation

@jit
def kernel(x, y, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    block = tl.load(x + row[:, None] * SIZE + row[None, :])
    for _ in range(4):
        block = tl.dot(block, tl.trans(block)).to(tl.bfloat16)
    tl.store(y + row[:, None] * SIZE + row[None, :], block)

def form(name, size):
    return Specialisation(name=name, kernel=kernel, signature={"x": "*bf16", "y": "*bf16"}, constants={"SIZE": size},
                          num_warps=1, num_stages=1)

SPECIALISATIONS = [form("fits", 32), form("spills", 128), form("does_not_build", 48)]
"""


def test_a_form_that_spills_and_one_that_does_not_build_are_convicted(compiler: Compiler) -> None:
    fits, spills, broken = compiler.forms("spilling", 90)
    assert fits["faults"] == []
    assert any("spills" in fault for fault in spills["faults"])
    assert broken["faults"]


def test_every_kernel_that_is_launched_early_lists_a_form_that_waits() -> None:
    """Its order in the compiled form is judged with its registers, above.

    Paged decode is launched early only behind its own first launch, from whose inputs it takes its own: one program
    waits for the end of it, others where they want its parts.
    """
    launched = ("early_launch(", "launch_pdl")
    early = [name for name in KERNELS if any(word in _source(name) for word in launched) and name != "paged_decode"]
    assert {"add_norm", "few_rows_gemm", "gemv", "merge_parts", "sample", "silu_multiply", "truncate"} <= set(early)
    for name in early:
        forms = importlib.import_module(f"weft.kernels.{name}").SPECIALISATIONS
        for kernel in {id(form.kernel) for form in forms}:
            mine = [form for form in forms if id(form.kernel) == kernel]
            assert all(form.waits == form.constants["EARLY"] for form in mine), name
            for capability in CAPABILITIES:
                waits = {form.waits for form in mine if capability in form.capabilities and not form.forced}
                assert waits == {capability >= 90}, f"{name} on sm_{capability}"


def _source(name: str) -> str:
    return (Path(weft.kernels.__file__).parent / f"{name}.py").read_text("utf-8")


UNTIMELY = """
from weft.kernels._jit import jit, tl
from weft.kernels.specialisation import Specialisation

@jit
def kernel(x, y, WAIT: tl.constexpr, FIRST: tl.constexpr):
    row = tl.arange(0, 128)
    if FIRST == "store":
        tl.store(y + row, row.to(tl.float32))
    value = row.to(tl.float32)
    if FIRST == "load":
        value = tl.load(x + row)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if FIRST != "load":
        value = tl.load(x + row)
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(y + row, value)

def form(name, wait=True, first="wait", ahead=False):
    return Specialisation(name=name, kernel=kernel, signature={"x": "*fp32", "y": "*fp32"}, num_warps=1, num_stages=1,
                          constants={"WAIT": wait, "FIRST": first}, waits=True, reads_ahead=ahead)

SPECIALISATIONS = [form("right"), form("ahead", first="load", ahead=True), form("never", wait=False),
                   form("reads", first="load"), form("writes", first="store", ahead=True)]
"""


def test_a_kernel_that_is_launched_early_and_does_not_wait_is_convicted(compiler: Compiler) -> None:
    rows = {row["name"]: row for row in compiler.forms("untimely", 90)}
    assert rows["right"]["memory"] == ["wait", "load", "release", "store"]
    faults = {name: " ".join(row["faults"]) for name, row in rows.items()}
    assert faults["right"] == faults["ahead"] == ""
    assert "never waits" in faults["never"]
    assert "a load before" in faults["reads"]
    assert "a store before" in faults["writes"]
