"""Attention as others compute it: PyTorch's SDPA with a named backend, and the plain matrix of all scores."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}


def sdpa(system: str, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """Query `[B, H_q, N, D]`, key and value `[B, H_kv, S, D]`. RuntimeError where the backend cannot run them."""
    with sdpa_kernel([BACKENDS[system]]):
        return scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
        )


def version_of(system: str) -> str:
    cudnn = torch.backends.cudnn.version() if system == "sdpa cudnn" else None
    return torch.__version__ + ("" if cudnn is None else f", cuDNN {cudnn}")


def naive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over `[B, H, N, D]` by way of all scores `[B, H, N, N]`, softmax in float32."""
    length = query.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def naive_bytes(num_scores: int, *, backward: bool) -> int:
    """About what `naive` holds at once: scores in two bytes twice or thrice and in four once or twice, and on the way
    back the gradients of each beside them.
    """
    return num_scores * (24 if backward else 12)
