"""All device work of a step: take in the plan, run the model, sample. Decides nothing.

On a GPU a step is a `StepProgram`, replayed as a graph where its size was captured and launched as it is elsewhere.
Anywhere else, and for samplers and backends that look at the device's numbers, the batch is gathered in plain torch.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.attention.interface import Cache
from weft.batch import SamplingRows
from weft.config import BlockGeometry, Limits
from weft.inference import logprobs, processing
from weft.inference.device_state import DeviceState
from weft.inference.failures import SAMPLING_RAISED
from weft.inference.graphs import StepGraphs
from weft.inference.logprobs import LogitsOf, LogprobRows, as_drawn
from weft.inference.plan import StepPlan
from weft.inference.processing import Processing
from weft.inference.sampler import KernelSampler, Sampler, cuts
from weft.inference.step_program import LOG_ENTRIES, StepProgram
from weft.inference.step_sizes import StepSize, StepSizes
from weft.inference.token_logprobs import StepLogprobs
from weft.layers.operations import Attend, Operations
from weft.models.family import Model

logger = logging.getLogger("weft")

# Called once a step with the float32 logits of its logit rows, in the plan's order. On the plain path before sampling.
Observer = Callable[[StepPlan, Float[Tensor, "R V"]], None]


class StepHandle:
    """A step under way; its tokens may be read later than the next step starts."""

    def __init__(
        self, plan: StepPlan, read: Callable[[], list[int]], read_logprobs: Callable[[], StepLogprobs] | None = None
    ) -> None:
        """read: gives a token for each logit row of the plan, and waits for them.

        read_logprobs: gives the logprobs that the plan's requests want, after that; None: nobody wants any.
        """
        self._num_logit_rows = plan.num_logit_rows
        self._read = read
        self._read_logprobs = read_logprobs

    def tokens(self) -> list[list[int]]:
        """For each request of the plan what it sampled, one token a logit row; below 0: see `failures`."""
        sampled = self._read()
        ends = list(accumulate(self._num_logit_rows))
        return [sampled[end - count : end] for end, count in zip(ends, self._num_logit_rows, strict=True)]

    def logprobs(self) -> StepLogprobs | None:
        """What is known of those tokens and of prompts, for who asked; to be called after `tokens`."""
        return None if self._read_logprobs is None else self._read_logprobs()


class ModelRunner:
    """Owns the device state and the cache of one engine. `observe` sees logits; nothing else of weft does.

    num_steps: steps so far, by how they reached the device: "graph", "launched" (a program whose size has no graph) or
        "plain".
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        sampler: Sampler,
        *,
        limits: Limits,
        geometry: BlockGeometry,
        device: torch.device,
        operations: Callable[[Attend], Operations[Any]],
        vocab_size: int,
        logprobs_mode: str = "raw_logprobs",
        observe: Observer | None = None,
    ) -> None:
        """logprobs_mode: see `ModelConfig`."""
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._operations = operations
        self._device = device
        self._limits = limits
        self._state = DeviceState(limits, geometry, device)
        self._logprobs = LogprobRows(device)
        self._logprobs_mode = logprobs_mode
        self._vocab_size = vocab_size
        self._processing = Processing(self._state)
        self._observe = observe
        self._program: StepProgram | None = None
        self._sizes: StepSizes | None = None
        self._graphs: StepGraphs | None = None
        self._num_program_steps: int | None = 0  # None: to be asked of the device
        self.num_steps: Counter[str] = Counter()
        if cache.capturable and isinstance(sampler, KernelSampler):
            self._program = StepProgram(
                model,
                cache,
                sampler,
                self._state,
                limits=limits,
                operations=operations,
                keep_logits=None if observe is None else vocab_size,
            )

    @property
    def can_capture(self) -> bool:
        """Whether steps can be captured: on CUDA, with a backend and a sampler that read nothing back."""
        return self._program is not None and self._device.type == "cuda"

    @torch.inference_mode()
    def measure(self, sizes: StepSizes, *, with_graphs: bool) -> int:
        """Bytes that the longest steps take on the device, and beside them the largest graphs."""
        if self._program is None:
            return 0
        with self._on_device():
            return self._measured(self._program, sizes, with_graphs=with_graphs)

    def _measured(self, program: StepProgram, sizes: StepSizes, *, with_graphs: bool) -> int:
        device = self._device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(device)[0]
        for size in reversed(sizes.longest):  # whatever is compiled for launched steps is compiled here
            program.run(size)
        logprobs.rehearse(self._vocab_size, device)
        processing.rehearse(self._limits.max_num_seqs, self._vocab_size, self._limits.max_model_len, device)
        if with_graphs:
            largest = max(sizes.captured, key=lambda size: (size.is_decode, size))
            StepGraphs(program, {max(sizes.captured), largest})
        torch.cuda.synchronize(device)
        return max(0, before - torch.cuda.mem_get_info(device)[0])

    @torch.inference_mode()
    def capture(self, sizes: StepSizes, *, show_progress: bool = False) -> None:
        """Capture these sizes; the inputs are padding, so no block and no row of a request is touched."""
        assert self._program is not None, "nothing here can be captured"
        self._sizes = sizes
        with self._on_device():
            self._graphs = StepGraphs(self._program, sizes.captured, show_progress=show_progress)
            torch.cuda.synchronize()
        self._num_program_steps = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepHandle:
        """Start the step."""
        with self._on_device():
            self._state.apply(plan)
            self._logprobs.apply(plan)
            self._processing.apply(plan)
            if plan.block_copies:
                self._cache.copy_blocks(plan.block_copies)
            if self._program is not None and self._program.accepts(plan):
                return self._run_program(self._program, plan)
            return self._run_plain(plan)

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels, events and graphs go to the thread's current device, wherever their tensors lie."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _run_program(self, program: StepProgram, plan: StepPlan) -> StepHandle:
        num_tokens, num_requests = sum(plan.num_new_tokens), len(plan.rows)
        kept = [place for place, count in enumerate(plan.num_logit_rows) if count]
        if num_tokens == num_requests > len(kept):
            num_tokens += 1  # padding: a chunk of one token that stops short of its prompt's end is no decode
        truncates = self._state.truncates(plan)
        size = StepSize(num_tokens, num_requests, truncates)
        if self._sizes is not None:
            size = self._sizes.size_for(num_tokens, num_requests, truncates=truncates)
        captured = self._graphs is not None and size in self._graphs
        program.set_inputs(plan, size)
        # Not known while a step is on its way: who is interrupted, wherever it may be, cannot say how far it came.
        before, self._num_program_steps = self._num_program_steps, None
        if before is None:
            before = int(self._state.num_steps.item())
        logits = self._graphs.replay(size) if self._graphs is not None and captured else program.run(size)
        processed, read_logprobs = logits, None
        wants_logprobs = self._logprobs.wants(plan)
        if self._processing.concerns(plan):  # what a graph cannot hold; the tokens that it sampled are overwritten
            processed = self._processing(plan, logits, program.lengths(size), row_each=True)
            sampled = program.sample_again(size, processed)
        elif wants_logprobs:  # the same tokens, where they can be reached
            sampled = program.sample_again(size, logits)
        if wants_logprobs:
            scored = self._scored(logits, processed, program.sampling(size))
            read_logprobs = self._logprobs.launch(plan, sampled, logits_of=scored, row_each=True)
        self.num_steps["graph" if captured else "launched"] += 1
        step, wait = before + 1, self._mark()
        self._num_program_steps = step
        if self._observe is not None:
            self._observe(plan, program.logits[kept])

        def read() -> list[int]:
            latest = self._num_program_steps or step + LOG_ENTRIES
            assert latest - step < LOG_ENTRIES, "the tokens of this step may have been overwritten unread"
            wait()
            tokens: list[int] = program.token_log[step % LOG_ENTRIES, :num_requests].tolist()
            return tokens if len(kept) == num_requests else [tokens[place] for place in kept]

        return StepHandle(plan, read, read_logprobs)

    def _mark(self) -> Callable[[], None]:
        """A function that waits until the device has done what it was given so far."""
        if self._device.type != "cuda":
            return lambda: None
        done = torch.cuda.Event()
        done.record()
        return done.synchronize

    def _run_plain(self, plan: StepPlan) -> StepHandle:
        batch = self._state.gather(plan)
        ops = self._operations(self._cache.prepare(batch))
        hidden = self._model.forward(batch.token_ids, batch.positions, ops)
        logits = self._model.logits(hidden, batch.logit_rows, ops)
        if self._observe is not None:
            self._observe(plan, logits.float())
        processed = logits
        if self._processing.concerns(plan):
            in_place = self._observe is None and not self._logprobs.wants(plan)
            processed = self._processing(plan, logits, batch.sampling.positions, row_each=False, in_place=in_place)
        sampled = self._sample(processed, batch.sampling)
        self._state.commit(plan, batch.sequence_lengths, sampled)
        self.num_steps["plain"] += 1
        read_logprobs = None
        if self._logprobs.wants(plan):
            read_logprobs = self._logprobs.launch(
                plan,
                sampled,
                logits_of=self._scored(logits, processed, batch.sampling),
                prompt_logits_of=lambda rows: self._model.logits(hidden, rows, ops),
            )
        arrived = sampled.to("cpu", non_blocking=True)  # into pinned memory: the host need not wait for later steps
        wait = self._mark()

        def read() -> list[int]:
            wait()
            tokens: list[int] = arrived.tolist()
            return tokens

        return StepHandle(plan, read, read_logprobs)

    def _scored(self, logits: Float[Tensor, "R V"], processed: Float[Tensor, "R V"], rows: SamplingRows) -> LogitsOf:
        """Of which distribution logprobs are."""
        if self._logprobs_mode == "raw_logprobs":
            return lambda some: logits[some]

        def drawn_from(some: Int[Tensor, "_"]) -> Float[Tensor, "_ V"]:
            chosen = rows.only(some)
            return as_drawn(processed[some], chosen.temperatures, cuts(processed[some], chosen))

        return drawn_from

    def _sample(self, logits: Float[Tensor, "R V"], rows: SamplingRows) -> Int[Tensor, "R"]:
        """A token for each row. If the sampler raises, row by row: only the row at fault has none."""
        if len(logits) == 0:  # chunks that stop short: a sampler need not know of them
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        try:
            return self._sampler(logits, rows)
        except Exception:
            if len(logits) == 1:
                logger.exception("sampling a token failed; its request ends with finish_reason 'error'")
                return torch.full((1,), SAMPLING_RAISED, device=logits.device)
            # Noise is a function of (seed, position, token id), so a row says the same alone as beside others.
            return torch.cat(
                [self._sample(logits[row : row + 1], rows.only(slice(row, row + 1))) for row in range(len(logits))]
            )
