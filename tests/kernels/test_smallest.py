"""The list that compute-sanitizer is run over names every kernel and is right."""

from pathlib import Path

import pytest
import torch

from tests.kernels import smallest
from weft import kernels


@pytest.mark.parametrize("name", list(smallest.cases()))
def test_every_smallest_case_is_right(name: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    assert smallest.run(name, device, dtype) == 0


def test_every_kernel_is_among_them() -> None:
    text = " ".join(smallest.cases()).replace(" ", "_")
    modules = {
        path.stem for path in Path(kernels.__file__).parent.glob("[!_]*.py") if "@jit" in path.read_text("utf-8")
    }
    inside = {"pieces", "cache_write", "merge_parts"}  # parts of the paged cases
    assert {name for name in modules - inside if name not in text} == set()
