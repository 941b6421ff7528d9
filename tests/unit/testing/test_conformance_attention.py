"""Somebody else's backend before the laws: the sound one is acquitted, each faulty one is convicted by its law."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.attention import find_backend
from weft.attention.interface import AttentionSpec
from weft.batch import Batch
from weft.config import BlockGeometry, CacheConfig, Limits
from weft.testing import run_attention_conformance
from weft.testing.conformance.attention import LAWS
from weft.testing.conformance.suite import ConformanceError
from weft.testing.finding import Outcome, name_of

# As another project runs them, without a check of every call's annotations.
pytestmark = pytest.mark.usefixtures("as_users_run_it")


class ByTheFormula:
    """A foreign backend in a page: slots in two flat tensors, softmax written out; soft caps too."""

    name = "by-the-formula"

    def supports(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        return "one cache group" if spec.cache_group else None

    def geometry(self, limits: Limits, config: CacheConfig) -> BlockGeometry:
        return BlockGeometry(num_blocks=config.num_blocks or 9, block_size=config.block_size or 8, shareable=True)

    def bytes_per_block(self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype) -> int:
        return 2 * len(specs) * geometry.block_size * specs[0].num_kv_heads * specs[0].head_dim * dtype.itemsize

    def allocate(
        self, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: torch.dtype, device: torch.device
    ) -> "Slots":
        return Slots(self, specs, geometry, dtype)

    # What the faults below change.

    def declared(self, spec: AttentionSpec) -> AttentionSpec:
        return spec

    def slots(self, slots: Tensor) -> Tensor:
        return slots

    def copied(self, memory: Tensor) -> Tensor:
        return memory

    def group(self, heads: Tensor, times: int) -> Tensor:
        return heads.repeat_interleave(times, dim=1)

    def layer(self, layer: int) -> int:
        return layer

    def table(self, table: Tensor) -> Tensor:
        return table

    def keys_before(self, end: int) -> Tensor:
        return torch.arange(end)

    def positions(self, positions: Tensor) -> Tensor:
        return positions

    def values(self, values: Tensor, hidden: Tensor) -> Tensor:
        """Where no query sees a key, not even its NaN."""
        return values.masked_fill(hidden.all(0)[:, None, None], 0)


class Slots:
    capturable = False

    def __init__(self, backend: ByTheFormula, specs: Sequence[AttentionSpec], geometry: BlockGeometry, dtype: Any):
        shape = (len(specs), geometry.num_blocks + 1, geometry.block_size, specs[0].num_kv_heads, specs[0].head_dim)
        self.backend, self.specs, self.size = backend, specs, geometry.block_size
        self.keys, self.values = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for memory in (self.keys, self.values):
                part = self.backend.copied(memory)
                part[:, target] = part[:, source]

    def prepare(self, batch: Batch) -> Any:
        tables = batch.groups[0]
        starts, ends = batch.query_starts.tolist(), batch.sequence_lengths.tolist()

        def attend(layer: int, qkv: Tensor, positions: Tensor, heads: Any) -> Tensor:
            spec = self.backend.declared(self.specs[layer])
            layer = self.backend.layer(layer)
            query, key, value = heads(qkv, positions)
            keys, values = self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)
            keys[self.backend.slots(tables.slot_mapping)] = key
            values[self.backend.slots(tables.slot_mapping)] = value
            results = []
            for place, end in enumerate(ends):
                rows = slice(starts[place], starts[place + 1])
                seen = self.backend.keys_before(end)
                table = self.backend.table(tables.block_tables[place])
                slots = table[seen // self.size] * self.size + seen % self.size
                times = spec.num_query_heads // spec.num_kv_heads
                wide = (self.backend.group(memory[slots], times) for memory in (keys, values))
                results.append(self.formula(spec, query[rows], *wide, self.backend.positions(positions[rows])))
            return torch.cat(results)

        return attend

    def formula(self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        distance = positions[:, None] - torch.arange(len(keys))
        hidden = (distance < 0) | (distance >= (spec.window or len(keys)))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, self.backend.values(values, hidden)).flatten(1)


class SeesOneMore(ByTheFormula):
    """transformers#39408: a window of w shows the key at w as well."""

    def declared(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, window=None if spec.window is None else spec.window + 1)


class LosesTheCap(ByTheFormula):
    """vllm-metal#665: the call site passes none."""

    def declared(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, soft_cap=None)


class WritesPadding(ByTheFormula):
    """vllm#43810: slot -1 is the last slot of the last block."""

    def slots(self, slots: Tensor) -> Tensor:
        return torch.where(slots == -1, 9 * 8 - 1, slots)


class GroupsByTurns(ByTheFormula):
    """Query heads take the key heads by turns instead of in groups."""

    def group(self, heads: Tensor, times: int) -> Tensor:
        return heads.repeat(1, times, 1)


class CopiesOneLayer(ByTheFormula):
    def copied(self, memory: Tensor) -> Tensor:
        return memory[:1]


class OneLayerForAll(ByTheFormula):
    def layer(self, layer: int) -> int:
        return 0


class ScalesByTheHead(ByTheFormula):
    def declared(self, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, scale=spec.head_dim**-0.5)


class CountsFromTheChunk(ByTheFormula):
    """A chunk's first token is taken for the sequence's."""

    def positions(self, positions: Tensor) -> Tensor:
        return torch.arange(len(positions))


class WeighsNanByNothing(ByTheFormula):
    """A hidden value has the weight 0, and 0 times NaN is NaN."""

    def values(self, values: Tensor, hidden: Tensor) -> Tensor:
        return values


class ReadsWholeBlocks(WeighsNanByNothing):
    def keys_before(self, end: int) -> Tensor:
        return torch.arange(-(-end // 8) * 8)


class KnowsOneOwner(ByTheFormula):
    """A block is read by the request that came with it first, and by no other."""

    def allocate(self, *how: Any) -> "Slots":
        self.owners: dict[int, int] = {}
        return super().allocate(*how)

    def table(self, table: Tensor) -> Tensor:
        last = int(table[-1])
        return torch.tensor([one if self.owners.setdefault(one, last) == last else 9 for one in table.tolist()])


class MovesBlocks(ByTheFormula):
    """What was copied is not there any more."""

    def allocate(self, *how: Any) -> "Slots":
        class Moving(Slots):
            def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
                super().copy_blocks(pairs)
                self.keys[:, [source for source, _ in pairs]] = 0

        specs, geometry, dtype, _ = how
        return Moving(self, specs, geometry, dtype)


class CountsKeysAlone(ByTheFormula):
    def bytes_per_block(self, *how: Any) -> int:
        return super().bytes_per_block(*how) // 2


COPIED = "copied blocks are whole in every layer and leave the rest"
FAULTS = {
    "a window counts the query itself however the tokens come": SeesOneMore,
    "a soft cap reaches the scores": LosesTheCap,
    "a slot of minus one writes nothing": WritesPadding,
    "attention equals the formula in float64": GroupsByTurns,
    COPIED: CopiesOneLayer,
    "requests and layers are kept apart": OneLayerForAll,
    "the scale is the layers own": ScalesByTheHead,
    "chunks never change attention": CountsFromTheChunk,
    "memory that nobody wrote is never read": ReadsWholeBlocks,
    "what a window hides cannot reach a query": WeighsNanByNothing,
    "requests that share blocks read the same": KnowsOneOwner,
    "the bytes of a block are those allocated": CountsKeysAlone,
}


@pytest.mark.parametrize(
    "name", ["contiguous", "paged_gather", pytest.param("paged_triton", marks=pytest.mark.nightly)]
)
def test_wefts_own_are_acquitted_of_all_that_they_do_not_refuse(name: str) -> None:
    report = run_attention_conformance(find_backend(name))
    refused = {"a soft cap reaches the scores"} if name != "paged_triton" else set()
    if name == "contiguous":
        refused |= {"requests that share blocks read the same", "a slot of minus one writes nothing"}
    assert report.not_judged.keys() == refused


def test_a_foreign_one_is_acquitted_by_every_law() -> None:
    """Made by anything that can be called; docs/conformance.md gives a class."""
    assert not run_attention_conformance(lambda: ByTheFormula()).not_judged


@pytest.mark.parametrize("law", FAULTS)
def test_a_faulty_one_is_convicted_by_its_law_and_the_input_is_shown(law: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        run_attention_conformance(FAULTS[law]())
    broken = caught.value.report.laws(Outcome.BROKEN)
    assert law in broken
    assert broken[law].startswith("given ")


def test_blocks_that_are_moved_are_not_copied() -> None:
    with pytest.raises(ConformanceError) as caught:
        run_attention_conformance(MovesBlocks())
    assert caught.value.report.laws(Outcome.BROKEN).keys() == {COPIED}


def test_every_law_convicts_some_fault() -> None:
    """The two that are left have tests of their own below."""
    left = {
        "it has the methods of a backend and its cache those of a cache",
        "what it cannot serve it refuses with a reason",
    }
    assert {name_of(law) for law in LAWS} - FAULTS.keys() == left


def test_one_without_a_method_is_convicted_by_its_name() -> None:
    class Unpriced(ByTheFormula):
        def __getattribute__(self, name: str) -> Any:
            if name == "bytes_per_block":
                raise AttributeError(name)
            return super().__getattribute__(name)

    with pytest.raises(ConformanceError, match="Unpriced has no bytes_per_block"):
        run_attention_conformance(Unpriced())


def test_what_it_refuses_is_not_judged_and_says_why() -> None:
    class Plain(ByTheFormula):
        def supports(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
            return "no caps here" if spec.soft_cap else super().supports(spec, dtype, device)

    assert run_attention_conformance(Plain()).not_judged == {"a soft cap reaches the scores": "no caps here"}


def test_one_that_refuses_everything_is_not_acquitted() -> None:
    class Nothing(ByTheFormula):
        def supports(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
            return ""

    with pytest.raises(ConformanceError, match="says '', no reason"):
        run_attention_conformance(Nothing())


def test_a_good_reason_to_refuse_everything_is_no_acquittal_either() -> None:
    """A backend for GPUs, say: nothing of it was seen, and a test of it must not be green."""

    class Elsewhere(ByTheFormula):
        def supports(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
            return f"not on {device}"

    with pytest.raises(ConformanceError, match="0 holds, 0 broken, 14 not judged") as caught:
        run_attention_conformance(Elsewhere())
    assert {*caught.value.report.not_judged.values()} == {"it refuses the plainest layer too: not on cpu", "not on cpu"}
