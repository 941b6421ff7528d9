"""What the device knows of every running request, a row each: the authority that a step's batch is gathered from.

Nothing here reads the device back: tokens sampled by one step feed the next without passing the host.
"""

import struct
from itertools import accumulate, chain

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.batch import Batch, GroupTables, SamplingRows, Truncation
from weft.config import BlockGeometry, Limits
from weft.inference.plan import StepPlan
from weft.inference.sampling_params import SamplingParams
from weft.kernels.gather_step import StateTensors


class DeviceState:
    """Rows `0 .. max_num_seqs - 1`; the row after the last is scratch for padding, and so is the block it names."""

    token_ids: Int[Tensor, "rows S_max"]
    num_computed_tokens: Int[Tensor, "rows"]
    block_table: Int[Tensor, "rows M"]
    temperatures: Float[Tensor, "rows"]
    top_k: Int[Tensor, "rows"]
    top_p: Float[Tensor, "rows"]
    min_p: Float[Tensor, "rows"]
    seeds: Int[Tensor, "rows"]

    def __init__(self, limits: Limits, geometry: BlockGeometry, device: torch.device) -> None:
        rows = limits.max_num_seqs + 1
        self._device = device
        self._block_size = geometry.block_size
        self.token_ids = torch.zeros(rows, limits.max_model_len, dtype=torch.int64, device=device)
        self.num_computed_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        columns = geometry.blocks_for(limits.max_model_len)
        self.block_table = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self.block_table[-1] = geometry.num_blocks
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_steps = torch.zeros(1, dtype=torch.int64, device=device)
        # The host's copy of whose temperature is above 0, and of whom of these not all tokens may be drawn.
        self._noisy: set[int] = set()
        self._truncated: set[int] = set()

    @staticmethod
    def bytes_for(limits: Limits, geometry: BlockGeometry) -> int:
        """Memory that the state takes: tokens and block tables in int64, and 44 bytes a row beside them."""
        columns = limits.max_model_len + geometry.blocks_for(limits.max_model_len)
        return (limits.max_num_seqs + 1) * (columns * 8 + 44)

    @property
    def tensors(self) -> StateTensors:
        """What kernels are given of it."""
        return StateTensors(
            token_ids=self.token_ids,
            num_computed_tokens=self.num_computed_tokens,
            block_table=self.block_table,
            temperatures=self.temperatures,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seeds=self.seeds,
            num_steps=self.num_steps,
            block_size=self._block_size,
        )

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan changes: requests that take a row, blocks that a row gains. One copy from the host."""
        assert len(plan.new_blocks) == 1, "one cache group"
        grown, admissions = plan.new_blocks[0], plan.admissions
        if not grown and not admissions:
            return
        columns = self.block_table.shape[1]
        firsts = [(row * columns + first, len(blocks)) for row, first, blocks in grown]
        parts: list[list[int]] = [
            [place for first, count in firsts for place in range(first, first + count)],
            list(chain.from_iterable(blocks for _, _, blocks in grown)),
            [admission.row for admission in admissions],
            [admission.num_computed_tokens for admission in admissions],
            [_signed(admission.seed) for admission in admissions],
            [_top_k(admission.params) for admission in admissions],
            *(
                [_bits(getattr(admission.params, name)) for admission in admissions]
                for name in ("temperature", "top_p", "min_p")
            ),
            *(list(admission.token_ids) for admission in admissions),
        ]
        sent = self._tensor(list(chain.from_iterable(parts))).split([len(part) for part in parts])
        places, blocks, rows, computed, seeds, top_k, temperatures, top_p, min_p = sent[:9]
        self.block_table.view(-1)[places] = blocks
        if admissions:
            self.num_computed_tokens[rows] = computed
            self.seeds[rows] = seeds
            self.top_k[rows] = top_k
            self.temperatures[rows] = temperatures.view(torch.float64).float()
            self.top_p[rows] = top_p.view(torch.float64).float()
            self.min_p[rows] = min_p.view(torch.float64).float()
        for admission, token_ids in zip(admissions, sent[9:], strict=True):
            self.token_ids[admission.row, : len(token_ids)] = token_ids
            for rows_of, belongs in (
                (self._noisy, admission.params.temperature > 0),
                (self._truncated, _truncates(admission.params)),
            ):
                (rows_of.add if belongs else rows_of.discard)(admission.row)

    def gather(self, plan: StepPlan) -> Batch:
        """The step's batch, built on the device from its rows."""
        rows = self._tensor(plan.rows)
        counts = self._tensor(plan.num_new_tokens)
        starts = [0, *accumulate(plan.num_new_tokens)]
        total = starts[-1]
        query_starts = self._tensor(starts)
        owner = torch.repeat_interleave(torch.arange(len(plan.rows), device=self._device), counts, output_size=total)
        offsets = torch.arange(total, device=self._device) - query_starts[owner]
        computed = self.num_computed_tokens[rows]
        positions = computed[owner] + offsets
        row_of_token = rows[owner]
        blocks = self.block_table[row_of_token, positions // self._block_size]
        lengths = computed + counts
        return Batch(
            token_ids=self.token_ids[row_of_token, positions],
            positions=positions,
            sequence_lengths=lengths,
            query_starts=query_starts,
            groups=(
                GroupTables(
                    block_tables=self.block_table[rows],
                    slot_mapping=blocks * self._block_size + positions % self._block_size,
                ),
            ),
            logit_rows=self._tensor(_logit_rows(plan, starts)),
            sampling=self._sampling_rows(plan, lengths),
        )

    def commit(self, plan: StepPlan, lengths: Int[Tensor, "B"], sampled: Int[Tensor, "R"]) -> None:
        """After the step: its tokens count as computed, and each sampled token takes its place in its row."""
        self.num_computed_tokens[self._tensor(plan.rows)] = lengths
        ends = [(column, last) for column, last in enumerate(_last_logit_rows(plan)) if last is not None]
        if not ends:
            return
        columns, last_rows = self._tensor([column for column, _ in ends]), self._tensor([last for _, last in ends])
        rows = self._tensor([plan.rows[column] for column, _ in ends])
        # A full context has no place for the token; a failed row (below 0) keeps a valid id until the host drops it.
        places = lengths[columns].clamp(max=self.token_ids.shape[1] - 1)
        self.token_ids[rows, places] = sampled[last_rows].clamp(min=0)

    def truncates(self, plan: StepPlan) -> bool:
        """Whether the plan has a row of which not all tokens may be drawn. Costs nothing where no request has one."""
        return bool(self._truncated) and not self._truncated.isdisjoint(plan.rows)

    def sampling(
        self, rows: Int[Tensor, "R"], positions: Int[Tensor, "R"], *, any_noise: bool, truncates: bool
    ) -> SamplingRows:
        """What the sampler needs of these rows."""
        return SamplingRows(
            temperatures=self.temperatures[rows],
            seeds=self.seeds[rows],
            positions=positions,
            any_noise=any_noise,
            truncation=Truncation(top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])
            if truncates
            else None,
        )

    def _sampling_rows(self, plan: StepPlan, lengths: Int[Tensor, "B"]) -> SamplingRows:
        """One entry a logit row: a last row samples the token after the last one, an earlier row one before."""
        columns = [column for column, count in enumerate(plan.num_logit_rows) for _ in range(count)]
        backwards = [count - 1 - row for count in plan.num_logit_rows for row in range(count)]
        rows = [plan.rows[column] for column in columns]
        return self.sampling(
            self._tensor(rows),
            lengths[self._tensor(columns)] - self._tensor(backwards),
            any_noise=not self._noisy.isdisjoint(rows),
            truncates=not self._truncated.isdisjoint(rows),
        )

    def _tensor(self, values: list[int] | tuple[int, ...]) -> Int[Tensor, "_"]:
        # Pinned, so that the copy waits for nobody; torch keeps the memory until the copy has read it.
        pinned = self._device.type == "cuda" and torch.cuda.is_available()  # a simulated device has no host memory
        return torch.tensor(values, dtype=torch.int64, pin_memory=pinned).to(self._device, non_blocking=True)


def _signed(seed: int) -> int:
    """The 64 bits of a seed as an int64 holds them."""
    return seed - 2**64 if seed >= 2**63 else seed


def _top_k(params: SamplingParams) -> int:
    """0 is all tokens; no vocabulary is larger than 2**31."""
    return min(max(params.top_k, 0), 2**31 - 1)


def _truncates(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _bits(number: float) -> int:
    """The 64 bits of a float, so that it travels among integers."""
    (bits,) = struct.unpack("q", struct.pack("d", number))
    return int(bits)


def _logit_rows(plan: StepPlan, starts: list[int]) -> list[int]:
    """Indices into the step's tokens: the last `num_logit_rows` of each request.

    2 requests of 3 and 1 new tokens, 2 and 1 logit rows: [1, 2, 3]
    """
    ends = zip(starts[1:], plan.num_logit_rows, strict=True)
    return [index for end, count in ends for index in range(end - count, end)]


def _last_logit_rows(plan: StepPlan) -> list[int | None]:
    """For each request the place of its last logit row among all of them, or None if it has none."""
    ends = accumulate(plan.num_logit_rows)
    return [end - 1 if count else None for end, count in zip(ends, plan.num_logit_rows, strict=True)]
