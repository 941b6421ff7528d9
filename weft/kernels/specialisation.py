"""One compiled form of a kernel, and what the compiler says it costs. Knows no kernel.

A kernel module lists in `SPECIALISATIONS` the forms it launches on real models. `compile_for` compiles one for a GPU
that need not be there, so a machine without any can tell that a kernel builds, fits in shared memory and keeps its
values in registers. As a program, `python -m weft.kernels.specialisation MODULE CAPABILITY` prints a JSON line for each
form that is launched, with `first` for the first of them alone, with `sample` for a few in which every setting occurs,
with `forced` for those that only a forced choice launches, with a form's name for that one; it must run without
TRITON_INTERPRET, which turns kernels into Python functions. With `-` it reads such requests from standard input, one a
line, and ends each answer with an empty line: torch is imported once for all.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.kernels._jit import HAS_TRITON, require_triton

# Compute capabilities that every kernel must build for: A100, L4 and RTX 40, H100 and H200, B200.
CAPABILITIES = (80, 89, 90, 100)

# Where speed is promised, and so no register may be spilled. Elsewhere a kernel has to build and to fit.
STRICT_CAPABILITIES = (90,)

# Bytes of shared memory that one program may have (CUDA C++ programming guide, technical specifications).
SHARED_MEMORY_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True, kw_only=True)
class Specialisation:
    """One form of a kernel. `signature` types every argument that is no constant, in Triton's words (`*bf16`, `i32`,
    `tensordesc<bf16[64,128]>`); `aligned` names those whose address or value is a multiple of 16, as a launch would
    find out; `capabilities` says where the form is chosen; a `forced` one only where a caller asks for it. One that
    `waits` is launched before the kernel ahead has ended; if it `reads_ahead`, it loads parameters before it waits.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: frozenset[str] = frozenset()
    capabilities: tuple[int, ...] = CAPABILITIES
    options: Mapping[str, Any] = field(default_factory=dict)
    forced: bool = False
    waits: bool = False
    reads_ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one program of a compiled kernel needs: registers a thread, and bytes. Spilled registers live in
    `local_bytes` or on the stack.
    """

    name: str
    capability: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    instructions: tuple[str, ...]  # of those worth knowing about, which occur in the PTX
    memory: tuple[str, ...] = ()  # loads, stores, barriers, waits, releases in the order of the PTX, repeats left out
    waits: bool = False
    reads_ahead: bool = False
    row_sums: int = 0  # places where threads sum a row, in an order that follows from who has which columns
    sum_layouts: tuple[str, ...] = ()  # who has which, where a program sums the one row that it has

    def faults(self) -> list[str]:
        """What is wrong, in words; empty when nothing is."""
        limit = SHARED_MEMORY_BYTES[self.capability]
        found = []
        if self.capability in STRICT_CAPABILITIES and (self.stack_bytes or self.local_bytes):
            found.append(f"spills: {self.stack_bytes} B of stack, {self.local_bytes} B of local memory a thread")
        if self.shared_bytes > limit:
            found.append(f"needs {self.shared_bytes} B of shared memory, sm_{self.capability} has {limit}")
        if self.waits:
            found += self._untimely()
        return found

    def _untimely(self) -> list[str]:
        """What a kernel does too early that is launched before the one ahead has ended, which it has to wait for."""
        if "wait" not in self.memory:
            return ["never waits for the kernel ahead of it"]
        before = self.memory[: self.memory.index("wait")]
        allowed = ("barrier", "load") if self.reads_ahead else ("barrier",)
        return [f"a {event} before it waits for the kernel ahead of it" for event in before if event not in allowed]


_NOTABLE = ("wgmma.mma_async", "mma.sync", "tcgen05.mma", "cp.async.bulk.tensor", "cp.async.cg", "setmaxnreg")

_EVENTS = {
    "load": r"ld\.global|cp\.async\.c[ag]|cp\.async\.bulk\S*shared\S*\.global",
    "store": r"st\.global|atom\.|red\.(?:global|async|relaxed)|cp\.async\.bulk\S*global\S*\.shared",
    "barrier": r"bar\.(?:warp\.)?sync",
    "wait": r"griddepcontrol\.wait",
    "release": r"griddepcontrol\.launch_dependents",
}


def _memory(ptx: str) -> tuple[str, ...]:
    """What touches global memory or another's time, be it a thread's or a kernel's, in the order of the text.

    >>> _memory("ld.global.v4.b32 a; ld.global.b32 b; griddepcontrol.wait; st.global.b32 c;")
    ('load', 'wait', 'store')
    """
    pattern = "|".join(f"(?P<{name}>{words})" for name, words in _EVENTS.items())
    events = [str(match.lastgroup) for match in re.finditer(pattern, ptx)]
    return tuple(event for event, former in zip(events, [None, *events], strict=False) if event != former)


_ROW_SUM = re.compile(r'"tt\.reduce"\(%[\w#]+\) <\{axis = 1 : i32\}> \(\{[^}]*arith\.addf')
_SUM_OF_ALL = re.compile(
    r'"tt\.reduce"\(%[\w#]+\) <\{axis = 0 : i32\}> \(\{[^}]*arith\.addf[^}]*\}\) : \(tensor<[^,>]+, (#\w+)>\)'
)


def _sum_layouts(ttgir: str) -> tuple[str, ...]:
    named = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    return tuple(named[name] for name in _SUM_OF_ALL.findall(ttgir))


def compile_for(form: Specialisation, capability: int) -> Resources:
    """Compile one form for a compute capability, whatever this machine has.

    Raises KernelError without Triton; the compiler's own error when the kernel does not build.
    """
    require_triton()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = form.kernel.arg_names
    constants = {(arguments.index(name),): value for name, value in form.constants.items()}
    signature = {name: "constexpr" if name in form.constants else form.signature[name] for name in arguments}
    attributes = {(arguments.index(name),): [["tt.divisibility", 16]] for name in form.aligned}
    source = ASTSource(form.kernel, signature, constants, attributes)
    options = {"num_warps": form.num_warps, "num_stages": form.num_stages, **form.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(
        name=form.name,
        capability=capability,
        registers=found["REG"],
        stack_bytes=found["STACK"],
        local_bytes=found["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        instructions=tuple(word for word in _NOTABLE if word in compiled.asm["ptx"]),
        memory=_memory(compiled.asm["ptx"]),
        waits=form.waits,
        reads_ahead=form.reads_ahead,
        row_sums=len(_ROW_SUM.findall(compiled.asm["ttgir"])),
        sum_layouts=_sum_layouts(compiled.asm["ttgir"]),
    )


def settings(form: Specialisation) -> frozenset[tuple[Any, str, str]]:
    """What a form is compiled with, each value by itself, of the kernel that it is a form of."""
    values = {**form.constants, **form.signature, **form.options, "warps": form.num_warps, "stages": form.num_stages}
    aligned = {f"{name} aligned": name in form.aligned for name in form.signature}
    return frozenset((form.kernel, name, repr(value)) for name, value in {**values, **aligned}.items())


def sample(forms: Sequence[Specialisation]) -> list[Specialisation]:
    """Few of these forms, each value of every setting among them: in turn the first of those that add most."""
    missing = frozenset[tuple[Any, str, str]]().union(*map(settings, forms))
    chosen: list[Specialisation] = []
    while missing:
        chosen.append(max(forms, key=lambda form: len(settings(form) & missing)))
        missing -= settings(chosen[-1])
    return chosen


def _chosen(forms: Sequence[Specialisation], which: str) -> Sequence[Specialisation]:
    launched = [form for form in forms if not form.forced]
    groups = {
        "launched": launched,
        "first": launched[:1],
        "sample": sample(launched),
        "forced": [form for form in forms if form.forced],
    }
    return groups[which] if which in groups else [form for form in forms if form.name == which]


def main(module: str, capability: int, which: str = "launched") -> int:
    """Print a JSON line for each of these forms of a kernel module; 1 if one of them does not build."""
    status = 0
    forms = [form for form in importlib.import_module(module).SPECIALISATIONS if capability in form.capabilities]
    for form in _chosen(forms, which):
        try:
            resources = compile_for(form, capability)
            row = {**asdict(resources), "faults": resources.faults()}
        except Exception as error:  # whatever the compiler raises is this form's result, and the others go on
            status = 1
            row = {"name": form.name, "capability": capability, "faults": [f"{type(error).__name__}: {error}"]}
        print(json.dumps(row), flush=True)
    return status


if __name__ == "__main__":
    assert HAS_TRITON
    if sys.argv[1:] != ["-"]:
        sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
    for request in sys.stdin:
        module_name, asked, *rest = request.strip().split(maxsplit=2)  # a form's name may hold spaces
        main(module_name, int(asked), *rest)
        print(flush=True)
