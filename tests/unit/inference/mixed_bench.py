"""An engine with text around it over a model of integers, and what each request says there and alone.

All of it is weft's own but the model, its cache and its words. It is taken as source, so that faults can be planted.
A step reaches the "device" in any of the ways there are: plain; as a program, its two kernels replaced by their
references; as a program in the sizes that graphs have, each size bound once, as a capture binds it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count
from math import nan
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.unit.inference.integer_model import VOCAB_SIZE, IntegerCache, IntegerModel
from tests.unit.inference.planting import Edit, planted_in
from weft.config import BlockGeometry, EngineConfig, Limits
from weft.inference.plan import StepPlan
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.interface import GenerationDefaults
from weft.outputs import PlaceLogprobs, RequestOutput

MODULES = (
    *("device_state", "processors", "row_processing", "step_processing", "processing", "logprobs", "sampler"),
    *(
        "step_sizes",
        "step_program",
        "prompt_scores",
        "draft",
        "scheduler",
        "pipeline",
        "runner",
        "input_processor",
        "engine",
    ),
    *("weft.stop_strings", "weft.output_processor", "weft.text_engine"),
)
# Kernels would run in Triton's interpreter, a hundredth of a second each; that they equal these is their tests' matter.
REFERENCES: tuple[Edit, ...] = tuple(
    (
        "step_program",
        f"from weft.kernels.{name} import {name}\n",
        f"from weft.kernels.{name} import reference as {name}\n",
    )
    for name in ("gather_step", "commit_step")
)
WAYS = ("plain", "launched", "graphs")
EOS = (3, 11)
MAX_MODEL_LEN = 18
WORDS = ("a", "b", "ab", "ba", "", "c", "a b", "<s>")
Modules = Mapping[str, ModuleType]


@contextmanager
def made(*edits: Edit) -> Iterator[Modules]:
    """weft's modules with the edits made to them; they find each other, and nobody else sees them."""
    with planted_in(MODULES, (*REFERENCES, *edits)) as modules:
        yield modules


@lru_cache(maxsize=1)
def faultless() -> Modules:
    with made() as modules:
        return modules


class Words:
    """Token n says word n modulo their number. Of a text that ends in `c` that is held back, as half a character is."""

    def encode(self, text: str, **options: bool) -> list[int]:
        return [ord(character) % VOCAB_SIZE for character in text]

    def token_text(self, token_id: int) -> str:
        return WORDS[token_id % len(WORDS)]

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, **options: bool) -> "Speaker":
        return Speaker(skip_special_tokens)


class Speaker:
    def __init__(self, skip: bool) -> None:
        self._skip, self._held = skip, ""

    def push(self, token_id: int) -> str:
        word = WORDS[token_id % len(WORDS)]
        text = self._held + ("" if self._skip and word == "<s>" else word)
        self._held = "c" if text.endswith("c") else ""
        return text.removesuffix(self._held)

    def finish(self) -> str:
        return self._held


class Sizes:
    """Every size of a program as a graph is: bound once, whatever is asked for; its logits go with the next."""

    def __init__(self, program: Any, sizes: Any) -> None:
        self.replayed: list[Any] = []
        self._bound = {size: partial(self._run, program, size) for size in sizes.captured}
        self._last = torch.empty(0)

    def __contains__(self, size: Any) -> bool:
        return size in self._bound

    def _run(self, program: Any, size: Any) -> Tensor:
        self.replayed.append(size)
        logits: Tensor = program.run(size)
        return logits

    def replay(self, size: Any) -> Tensor:
        self._last.fill_(nan)  # it was in memory that this one needs
        self._last = self._bound[size]()
        return self._last


@dataclass
class Answer:
    """What one answer has said so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    logprobs: list[PlaceLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def begins(self, whole: "Answer") -> bool:
        """Whether it could still become this one. Who is aborted is shown what might have become a stop string."""
        whole_text = (whole.text or "") + (whole.stop_reason if isinstance(whole.stop_reason, str) else "")
        return (
            self.token_ids == whole.token_ids[: len(self.token_ids)]
            and whole_text.startswith(self.text or "")
            and (self.logprobs or []) == (whole.logprobs or [])[: len(self.logprobs or [])]
        )


@dataclass
class Asked:
    prompt: tuple[int, ...]
    params: SamplingParams
    answers: list[Answer]
    alone: dict[int, tuple[Answer, list[PlaceLogprobs | None] | None]] = field(default_factory=dict)
    prompt_logprobs: list[PlaceLogprobs | None] | None = None


class Bench:
    """One engine, who asks it for what, and what they are told."""

    def __init__(self, modules: Modules, way: str = "plain", **options: Any) -> None:
        options = {"model": "integers", "max_model_len": MAX_MODEL_LEN, "block_size": 4} | options
        self.config = EngineConfig.of(**{"num_blocks": 5 * options.get("max_num_seqs", 16), "device": "cpu"} | options)
        scheduler, cache = self.config.scheduler, self.config.cache
        assert cache.num_blocks is not None
        assert cache.block_size is not None
        limits = Limits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
        )
        geometry = BlockGeometry(num_blocks=cache.num_blocks, block_size=cache.block_size, shareable=True)
        sampler = modules["sampler"].GumbelSampler()
        if way != "plain":  # the same tokens, under the name by which an engine knows a program's sampler
            kind = type("Sampler", (modules["sampler"].KernelSampler,), {"__call__": lambda _, *given: plain(*given)})
            plain, sampler = sampler, kind()
        self.runner = modules["runner"].ModelRunner(
            IntegerModel(),
            IntegerCache(geometry, capturable=way != "plain"),
            sampler,
            limits=limits,
            geometry=geometry,
            device=torch.device("cpu"),
            operations=lambda attend: attend,
            vocab_size=VOCAB_SIZE,
            logprobs_mode=self.config.model.logprobs_mode,
        )
        if way == "graphs":
            sizes = modules["step_sizes"].StepSizes(
                limits, batch_sizes=self.config.execution.graph_batch_sizes, most_tokens=limits.max_num_batched_tokens
            )
            self.runner._sizes, self.runner._graphs = sizes, Sizes(self.runner._program, sizes)
        ready = SimpleNamespace(
            placement=None,
            limits=limits,
            geometry=geometry,
            vocab_size=VOCAB_SIZE,
            model=None,
            description="integers",
            seconds={},
            runner=self,
            overlap=bool(self.config.execution.overlap),
        )
        modules["engine"].start = lambda config, checkpoint, **options: ready
        checkpoint = SimpleNamespace(generation=GenerationDefaults(eos_token_ids=EOS, options={}))
        # Policies look at the time: were it that of the wall, no failure could be replayed.
        self.engine = modules["engine"].Engine(self.config, checkpoint, clock=count().__next__)
        self.text = modules["weft.text_engine"].TextEngine(self.engine, Words())
        self._add, self.engine.add_request = self.engine.add_request, self._note
        self.seeds: dict[str, int] = {}  # by the engine's ids
        self.asked: dict[str, Asked] = {}  # not ended yet
        self.plans: list[StepPlan] = []
        self.before: Callable[[], None] = lambda: None  # happens before a step is executed
        self.after: Callable[[], None] = lambda: None

    def _note(self, engine_id: str, prompt: Sequence[int], params: SamplingParams) -> int:
        told = self._add(engine_id, prompt, params)
        self.seeds[engine_id] = self.engine._scheduler._waiting[engine_id].seed
        return told

    def execute(self, plan: StepPlan) -> Any:
        """As a runner does."""
        self.plans.append(plan)
        self.before()
        handle = self.runner.execute(plan)
        self.after()
        return handle

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams, *, streams: bool = False) -> None:
        self.text.add_request(name, None, list(prompt), params, streams=streams)
        self.asked[name] = Asked(tuple(prompt), params, [Answer() for _ in range(params.n)])

    def step(self) -> None:
        for output in self.text.step():
            self.take(output)

    def abort(self, name: str) -> None:
        for output in self.text.abort(name):
            self.take(output)
        assert name not in self.asked

    def run(self) -> "Bench":
        for _ in range(1000):
            if not self.asked:
                break
            self.step()
        assert not self.asked, "requests never end"
        assert self.engine.step() == []
        self.engine._scheduler.check_idle()
        return self

    def take(self, output: RequestOutput) -> None:
        """Every answer is the beginning of what it is alone, and all of it where it has ended."""
        name = output.request_id
        asked = self.asked[name]
        if output.prompt_logprobs is not None:
            assert asked.prompt_logprobs is None, "a prompt's logprobs come twice"
            asked.prompt_logprobs = output.prompt_logprobs
        for gained in output.outputs:
            answer = asked.answers[gained.index]
            assert answer.finish_reason is None, "it had ended"
            answer.token_ids += gained.token_ids
            answer.text = None if gained.text is None else (answer.text or "") + gained.text
            answer.logprobs = None if gained.logprobs is None else (answer.logprobs or []) + gained.logprobs
            answer.cumulative_logprob = gained.cumulative_logprob
            answer.finish_reason, answer.stop_reason = gained.finish_reason, gained.stop_reason
            if f"{name}/{gained.index}" in self.seeds:
                self.compare(name, asked, gained.index)
        if output.finished:
            assert all(answer.finish_reason is not None for answer in asked.answers)
            del self.asked[name]

    def compare(self, name: str, asked: Asked, index: int) -> None:
        if index not in asked.alone:
            asked.alone[index] = self.solo(asked, index, self.seeds[f"{name}/{index}"])
        answer, (alone, prompt_logprobs) = asked.answers[index], asked.alone[index]
        if answer.finish_reason in (None, "abort"):
            assert answer.begins(alone), (answer, alone)
        else:
            assert answer == alone
        if index == 0 and answer.token_ids:
            assert asked.prompt_logprobs == prompt_logprobs or answer.finish_reason is None, "the prompt's logprobs"

    def solo(self, asked: Asked, index: int, seed: int) -> tuple[Answer, list[PlaceLogprobs | None] | None]:
        if asked.params.seed is not None:
            assert seed == (asked.params.seed + index) % 2**64
        scores = None if index else asked.params.prompt_logprobs
        params = replace(asked.params, n=1, seed=seed, prompt_logprobs=scores)
        return solo(asked.prompt, params, self.config.model.logprobs_mode)


@lru_cache(maxsize=20_000)
def solo(
    prompt: tuple[int, ...], params: SamplingParams, logprobs_mode: str
) -> tuple[Answer, list[PlaceLogprobs | None] | None]:
    """What a request says in an engine of its own, without anything that could change it."""
    modules = faultless()
    bench = Bench(modules, max_num_seqs=1, logprobs_mode=logprobs_mode, enable_prefix_caching=False)
    bench.text.add_request("r", None, list(prompt), params)
    outputs: list[RequestOutput] = []
    while bench.text.has_unfinished_requests():
        outputs += bench.text.step()
    (output,) = outputs
    (answer,) = output.outputs
    said = Answer(
        answer.token_ids,
        answer.text,
        answer.logprobs,
        answer.cumulative_logprob,
        answer.finish_reason,
        answer.stop_reason,
    )
    return said, output.prompt_logprobs
