"""The two judges of a kernel's numbers, which are the conformance suite's."""

from weft.testing.conformance.accuracy import MOST, POOL, RMS, SINGLE, assert_by_the_rule, assert_within, unit

__all__ = ["MOST", "POOL", "RMS", "SINGLE", "assert_by_the_rule", "assert_within", "unit"]
