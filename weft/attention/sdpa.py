"""One request's attention through torch's scaled_dot_product_attention, called as HuggingFace calls it.

The backends that read keys and values as dense tensors share it; it knows no cache.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from weft.attention.interface import AttentionSpec


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Bool[Tensor, "T S"] | None:
    """Which keys each query sees, the last query standing at the last key; None where torch's own rule says the same.

    window 2, 2 queries, 4 keys:   . x x .
                                   . . x x
    """
    within = window is None or num_keys <= window
    if within and num_queries in (1, num_keys):
        return None
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)[None, :]
    seen = keys <= queries
    return seen if within else seen & (keys > queries - window)  # type: ignore[operator]  # window is set here


def attend(
    query: Float[Tensor, "1 H_q T D"],
    keys: Float[Tensor, "1 H_kv S D"],
    values: Float[Tensor, "1 H_kv S D"],
    spec: AttentionSpec,
    mask: Bool[Tensor, "T S"] | None,
) -> Float[Tensor, "1 H_q T D"]:
    """Attention of T queries over S keys, the last query at the last key.

    Without a mask torch groups the query heads itself; with one, keys and values are repeated, since HuggingFace
    does so and torch's grouped path rounds differently.
    """
    grouped = spec.num_query_heads != spec.num_kv_heads
    if grouped and mask is not None:
        repeats = spec.num_query_heads // spec.num_kv_heads
        keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    return functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=None if mask is None else mask[None, None],
        is_causal=mask is None and query.shape[2] > 1,
        scale=spec.scale,
        enable_gqa=grouped and mask is None,
    )
