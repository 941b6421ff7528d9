"""The harness: what verifies weft, and any other engine. Names are imported on first use; no torch before.

    oracle = Oracle(location, dtype=torch.float32, device=torch.device("cpu"))     HuggingFace, the reference
    assert_token_exact(references, answers)        tier A: tokens, ends and logits equal the reference's, in float32
    assert_bitwise(expected, actual)               tier B: the same bits
    audit_near_ties(reference, again, actual, …)   tier C: in a narrow dtype, no further from it than it is from itself

The tiers are pytest fixtures of the same names as well, which keep count of every excuse as properties of the test.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.testing.bitwise import assert_bitwise
    from weft.testing.continuation import Continuation
    from weft.testing.exactness import assert_safe_margins, assert_token_exact
    from weft.testing.near_ties import Audit, audit_near_ties
    from weft.testing.oracle import Oracle

__all__ = [
    "Audit",
    "Continuation",
    "Oracle",
    "assert_bitwise",
    "assert_safe_margins",
    "assert_token_exact",
    "audit_near_ties",
]

_HOMES = {
    "Audit": "near_ties",
    "Continuation": "continuation",
    "Oracle": "oracle",
    "assert_bitwise": "bitwise",
    "assert_safe_margins": "exactness",
    "assert_token_exact": "exactness",
    "audit_near_ties": "near_ties",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
