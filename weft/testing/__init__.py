"""The harness: what verifies weft, and any other engine. Names are imported on first use; no torch before.

    oracle = Oracle(location, dtype=torch.float32, device=torch.device("cpu"))     HuggingFace, the reference
    assert_token_exact(references, answers)        tier A: tokens, ends and logits equal the reference's, in float32
    assert_bitwise(expected, actual)               tier B: the same bits
    audit_near_ties(reference, again, actual, …)   tier C: in a narrow dtype, no further from it than it is from itself

    run_policy_conformance(MyPolicy)               a class of one's own before the laws of its kind; and so for
                                                   attention, allocators, models, kernels, engines (docs/conformance.md)

The tiers are pytest fixtures of the same names as well, which keep count of every excuse as properties of the test.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.testing.bitwise import assert_bitwise
    from weft.testing.conformance.allocator import run_allocator_conformance
    from weft.testing.conformance.attention import run_attention_conformance
    from weft.testing.conformance.engine import run_engine_conformance
    from weft.testing.conformance.kernel import KernelOp, run_kernel_conformance
    from weft.testing.conformance.model import run_model_conformance
    from weft.testing.conformance.policy import run_policy_conformance
    from weft.testing.conformance.suite import ConformanceError, ConformanceReport
    from weft.testing.continuation import Continuation
    from weft.testing.exactness import assert_safe_margins, assert_token_exact
    from weft.testing.near_ties import Audit, audit_near_ties
    from weft.testing.oracle import Oracle

__all__ = [
    "Audit",
    "ConformanceError",
    "ConformanceReport",
    "Continuation",
    "KernelOp",
    "Oracle",
    "assert_bitwise",
    "assert_safe_margins",
    "assert_token_exact",
    "audit_near_ties",
    "run_allocator_conformance",
    "run_attention_conformance",
    "run_engine_conformance",
    "run_kernel_conformance",
    "run_model_conformance",
    "run_policy_conformance",
]

_HOMES = {
    "Audit": "near_ties",
    "ConformanceError": "conformance.suite",
    "ConformanceReport": "conformance.suite",
    "Continuation": "continuation",
    "KernelOp": "conformance.kernel",
    "Oracle": "oracle",
    "assert_bitwise": "bitwise",
    "assert_safe_margins": "exactness",
    "assert_token_exact": "exactness",
    "audit_near_ties": "near_ties",
    "run_allocator_conformance": "conformance.allocator",
    "run_attention_conformance": "conformance.attention",
    "run_engine_conformance": "conformance.engine",
    "run_kernel_conformance": "conformance.kernel",
    "run_model_conformance": "conformance.model",
    "run_policy_conformance": "conformance.policy",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
