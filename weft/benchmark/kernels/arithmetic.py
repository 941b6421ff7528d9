"""How much work an operation is: multiplications and additions, and bytes that have to be read. Knows no clock."""


def causal_flops(*, batch: int, num_queries: int, prefix: int, heads: int, head_dim: int) -> float:
    """Of attention forward: two products of two operations each, over the keys that a query sees.

    As papers count it: of `num_queries` keys beside the queries half are seen, of the prefix all.

    >>> causal_flops(batch=1, num_queries=4, prefix=0, heads=1, head_dim=8) / 8
    32.0
    >>> causal_flops(batch=1, num_queries=4, prefix=10, heads=1, head_dim=8) / 8
    192.0
    """
    seen = num_queries * prefix + num_queries * num_queries / 2
    return 4 * batch * heads * head_dim * seen


def backward_flops(forward: float) -> float:
    """Five products where forward has two: scores anew, gradients of weights, query, key and value."""
    return 2.5 * forward


def keys_and_values_bytes(*, batch: int, length: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """What a decode step has to read.

    >>> keys_and_values_bytes(batch=64, length=2048, kv_heads=8, head_dim=128, itemsize=2) >> 20
    512
    """
    return 2 * batch * length * kv_heads * head_dim * itemsize


def copies_beyond_cache(num_bytes: int, *, cache_bytes: int = 256 << 20, most: int = 64) -> int:
    """How many inputs of that size to take in turn, so that none is still in a cache when its turn comes again.

    256 MiB are five times the largest L2 cache (50 MiB of an H200); `most` bounds what small inputs would ask for.

    >>> copies_beyond_cache(32 << 20), copies_beyond_cache(1 << 30), copies_beyond_cache(4096)
    (8, 1, 64)
    """
    return max(1, min(most, -(-cache_bytes // max(1, num_bytes))))
