"""The tensors that one step carries from the runner to the model and its attention. Frozen, whole when it exists.

Knows no model, no cache and no request.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GroupTables:
    """Where one cache group (layers that share geometry and dtype) keeps this step's requests.

    block_tables: blocks of each request, in order; entries past its length are undefined.
    slot_mapping: `block * P + offset` for each new token; -1 writes nothing.
    """

    block_tables: Int[Tensor, "B M"]
    slot_mapping: Int[Tensor, "T_total"]


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Which tokens of each row may be drawn at all: top_k 0, top_p 1 and min_p 0 are every one."""

    top_k: Int[Tensor, "R"]
    top_p: Float[Tensor, "R"]
    min_p: Float[Tensor, "R"]

    def only(self, rows: slice | Int[Tensor, "_"]) -> "Truncation":
        return Truncation(top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """What the sampler needs of each selected row.

    seeds: the 64 bits of each seed, in int64.
    positions: the index of the token being sampled, prompt included.
    any_noise: whether any temperature is above 0, known to the host, so that a greedy step draws no noise.
    truncation: None where the host knows that no row is truncated.
    """

    temperatures: Float[Tensor, "R"]
    seeds: Int[Tensor, "R"]
    positions: Int[Tensor, "R"]
    any_noise: bool
    truncation: Truncation | None = None

    def only(self, rows: slice | Int[Tensor, "_"]) -> "SamplingRows":
        """The same for some of the rows."""
        return replace(
            self,
            temperatures=self.temperatures[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
            truncation=None if self.truncation is None else self.truncation.only(rows),
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step, ragged and without padding: request b owns tokens `query_starts[b] : query_starts[b + 1]`.

    Example, a 3-token prefill beside a decode at position 7:
        token_ids [5, 9, 2, 4]   positions [0, 1, 2, 7]   query_starts [0, 3, 4]   sequence_lengths [3, 8]

    sequence_lengths: tokens of each request after this step (computed before, plus new).
    logit_rows: indices into the T_total new tokens for which logits are wanted.
    """

    token_ids: Int[Tensor, "T_total"]
    positions: Int[Tensor, "T_total"]
    sequence_lengths: Int[Tensor, "B"]
    query_starts: Int[Tensor, "B+1"]
    groups: tuple[GroupTables, ...]
    logit_rows: Int[Tensor, "R"]
    sampling: SamplingRows
