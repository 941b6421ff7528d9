"""The list that compute-sanitizer is run over names every kernel and is right."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels import smallest
from weft import kernels
from weft.benchmark.kernels.contender import RIGHT
from weft.kernels import paged_decode

# Of a request of two splits: what is launched.
IN_PARTS = {
    "paged decode, merge_parts": ["kernel", "merge"],
    "paged decode, shares of a long request": ["kernel", "kernel"],
}


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.mark.parametrize("name", [name for name in smallest.cases() if name not in IN_PARTS])
def test_every_smallest_case_is_right(name: str, device: torch.device) -> None:
    error = 100 * smallest.cases()[name](device, dtype_on(device))
    assert RIGHT.met(error), f"error {error} %"


def test_a_case_that_is_wrong_is_counted(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    errors = {"right": 0.0, "wrong": 0.5, "wrong too": 0.5, "nowhere": float("nan")}
    monkeypatch.setattr(smallest, "cases", lambda: {name: lambda *_, e=e: e for name, e in errors.items()})
    assert [smallest.run(part, device, torch.float32) for part in ("", "wrong", "right")] == [3, 2, 0]


def test_every_kernel_is_among_them() -> None:
    text = " ".join(smallest.cases()).replace(" ", "_")
    # Not by "@jit": kernels may lie in a part of the module, whose name begins with an underscore.
    modules = {
        path.stem
        for path in Path(kernels.__file__).parent.glob("[!_]*.py")
        if "\nSPECIALISATIONS = " in path.read_text("utf-8")
    }
    inside = {"cache_write"}  # a part of the paged cases
    assert "truncate" in modules
    assert {name for name in modules - inside if name not in text} == set()


@pytest.mark.parametrize(("name", "launches"), IN_PARTS.items(), ids=IN_PARTS)
def test_a_request_of_two_splits_is_made_in_parts(
    name: str, launches: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    merge, kernel = paged_decode.merge_parts, paged_decode.paged_decode_kernel

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            found.append("kernel")
            return kernel[grid]

    def merged(*args: Any, **options: Any) -> None:
        found.append("merge")
        merge(*args, **options)

    monkeypatch.setattr(paged_decode, "paged_decode_kernel", Kernel())
    monkeypatch.setattr(paged_decode, "merge_parts", merged)
    assert smallest.run(name, device, dtype_on(device)) == 0
    assert found == launches
