"""The ladder from one request at a time to everything weft has: each rung is the one below and one thing more."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Rung:
    """options: fields of `EngineConfig`.   slow: measured once, on fewer requests.   most: requests at most."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False
    most: int | None = None


_EAGER = {"operations": "plain", "enforce_eager": True, "overlap": False}
_CONTIGUOUS = {"attention_backend": "contiguous"}
_TRITON = {"attention_backend": "paged_triton"}

RUNGS = (
    Rung(name="serial", options={**_EAGER, **_CONTIGUOUS, "max_num_seqs": 1}, slow=True, most=8),
    Rung(name="static batches", options={**_EAGER, **_CONTIGUOUS, "policy": "static"}, slow=True),
    Rung(name="continuous batches", options={**_EAGER, **_CONTIGUOUS}, slow=True),
    Rung(name="+ paged cache", options={**_EAGER, "attention_backend": "paged_gather"}, slow=True),
    Rung(name="+ paged attention in Triton", options={**_EAGER, **_TRITON}),
    Rung(name="+ CUDA graphs", options={**_TRITON, "operations": "plain", "overlap": False}),
    Rung(name="+ fused operations", options={**_TRITON, "operations": "fused", "overlap": False}),
    Rung(name="+ overlap", options={**_TRITON, "operations": "fused", "overlap": True}),
)
