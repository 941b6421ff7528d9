"""What happens to a packed projection before attention: split into heads, normalise them, rotate them."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from weft.layers.norm import RMSNorm, rms_norm
from weft.layers.rope import RotaryTable, rotate


class HeadTransform(nn.Module):
    """Data that a backend reads to fuse, and `forward`, the plain version that all of them must equal.

    query_norm, key_norm: per-head norms over D (Qwen3), or None.
    """

    def __init__(
        self,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: RotaryTable,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rotary = rotary
        self.query_norm = query_norm
        self.key_norm = key_norm

    def forward(
        self, qkv: Float[Tensor, "T_total packed"], positions: Int[Tensor, "T_total"]
    ) -> tuple[
        Float[Tensor, "T_total {self.num_query_heads} {self.head_dim}"],
        Float[Tensor, "T_total {self.num_kv_heads} {self.head_dim}"],
        Float[Tensor, "T_total {self.num_kv_heads} {self.head_dim}"],
    ]:
        """Queries and keys, normalised and rotated, and values."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split((self.num_query_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.query_norm is not None:
            query = rms_norm(query, self.query_norm)
        if self.key_norm is not None:
            key = rms_norm(key, self.key_norm)
        return rotate(query, positions, self.rotary), rotate(key, positions, self.rotary), value
