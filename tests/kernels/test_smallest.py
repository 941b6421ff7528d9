"""The list that compute-sanitizer is run over names every kernel and is right."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels import smallest
from weft import kernels
from weft.kernels import paged_decode


@pytest.mark.parametrize("name", list(smallest.cases()))
def test_every_smallest_case_is_right(name: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    assert smallest.run(name, device, dtype) == 0


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


@pytest.mark.parametrize(("name", "launches"), [("merge_parts", ["kernel", "merge"]), ("shares", ["kernel", "kernel"])])
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
    assert smallest.run(f"paged decode, {name}", device, torch.float32) == 0
    assert found == launches
