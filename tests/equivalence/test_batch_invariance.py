"""Tier B: with batch_invariant=True a request's logits are the same to the bit, whatever an engine does beside it.

The measure is the request alone, in one piece, with nothing cached. With the mode off the same comparison must show a
difference, or it proves nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from weft import LLM
from weft.attention.packed import packed, packed_on
from weft.config import EngineConfig
from weft.inference.backing import back
from weft.inference.placement import place as placed
from weft.inference.sampling_params import SamplingParams
from weft.layers.linear import Linear
from weft.layers.operations import Attend
from weft.layers.prepacked import PrepackedLinear
from weft.models.checkpoint.source import open_checkpoint
from weft.testing import assert_bitwise
from weft.testing.continuation import Continuation
from weft.testing.exactness import assert_safe_margins, assert_token_exact
from weft.testing.oracle import Oracle
from weft.testing.subject import Subject
from weft.testing.tiny import save_tiny_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 6}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 100}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    # Of heads so narrow the library adds up odd and even rows differently, where nothing fills them up.
    "narrow heads": ("llama", {"hidden_size": 80, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 10}),
}
LONGEST = 640
GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.9, seed=7)


@dataclass(frozen=True)
class Place:
    """Where an engine runs, and in what. most: requests that it is asked to run at once."""

    device: str
    dtype: str
    most: int
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join((self.device, self.dtype, *(str(value) for _, value in self.options)))

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def options_of(self, **options: Any) -> dict[str, Any]:
        defaults = {"max_num_seqs": self.most, "batch_invariant": True, "max_num_batched_tokens": 1024}
        return {"device": self.device, "dtype": self.dtype} | defaults | dict(self.options) | options

    def config(self, model: Path, **options: Any) -> EngineConfig:
        return EngineConfig.of(model=str(model), **self.options_of(**options))


CPU = Place("cpu", "float32", 12)
ON_A_CPU = [
    CPU,
    Place("cpu", "bfloat16", 12),
    Place("cpu", "float32", 12, (("cpu_linear", "plain"), ("attention_backend", "contiguous"))),
]
ON_A_GPU = [
    pytest.param(Place("cuda", dtype, most), marks=pytest.mark.gpu)
    for dtype, most in (("bfloat16", 256), ("float32", 64))
]


@pytest.fixture(
    params=[CPU, *(pytest.param(other, marks=pytest.mark.nightly) for other in ON_A_CPU[1:]), *ON_A_GPU], ids=str
)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def of(name: str) -> Path:
        model_type, config = MODELS[name]
        folder = tmp_path_factory.mktemp(name)
        return save_tiny_model(folder, model_type, seed=5, max_position_embeddings=LONGEST, **config)

    return of


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def say(
    config: EngineConfig,
    prompts: Sequence[list[int]],
    length: int,
    params: SamplingParams = GREEDY,
    arrivals: Sequence[int] | None = None,
    *,
    times: int = 1,
) -> list[Continuation]:
    """What an engine says the last of so many times; the second time whatever can be cached is."""
    subject = Subject(config, open_checkpoint(config.model.model))
    asked = [replace(params, max_tokens=length, ignore_eos=True)] * len(prompts)
    for _ in range(times):
        said = subject.run(prompts, asked, arrivals=arrivals)
    return said


def alone(place: Place, folder: Path, prompt: list[int], length: int, params: SamplingParams = GREEDY) -> Continuation:
    """With every other mode at its simplest, and its prompt in one piece."""
    return _alone(place, folder, tuple(prompt), length, params)


@cache
def _alone(place: Place, folder: Path, prompt: tuple[int, ...], length: int, params: SamplingParams) -> Continuation:
    config = place.config(folder, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True, overlap=False)
    (said,) = say(config, [list(prompt)], length, params)
    return said


def assert_same(expected: Continuation, actual: Continuation) -> None:
    assert actual.token_ids == expected.token_ids
    assert_bitwise([expected.logits], [actual.logits], names=["logits"])


def assert_same_in_a_crowd(place: Place, folder: Path, draw: int, params: SamplingParams, **options: Any) -> None:
    prompt, random = prompt_of(70), Random(draw)
    crowd = [prompt_of(random.randrange(1, 150), seed) for seed in range(1, random.randrange(3, place.most + 1))]
    mine = random.randrange(len(crowd) + 1)
    arrivals = [random.randrange(12) for _ in range(len(crowd) + 1)]
    said = say(place.config(folder, **options), [*crowd[:mine], prompt, *crowd[mine:]], 16, params, arrivals)
    assert_same(alone(place, folder, prompt, 16, params), said[mine])


@pytest.mark.parametrize(
    ("place", "model", "draw"),
    [
        *((ON_A_CPU[draw % 3], model, draw) for draw, model in enumerate(MODELS)),
        *(
            pytest.param(*where.values, model, draw, marks=pytest.mark.gpu)
            for where, (draw, model) in product(ON_A_GPU, enumerate(MODELS))
        ),
    ],
    ids=str,
)
def test_a_request_says_among_others_what_it_says_alone(
    place: Place, folder_of: Callable[[str], Path], model: str, draw: int
) -> None:
    assert_same_in_a_crowd(place, folder_of(model), draw, (GREEDY, DRAWN)[draw % 2])


@pytest.mark.nightly
@pytest.mark.parametrize("draw", range(20))
@pytest.mark.parametrize("model", MODELS)
def test_a_request_says_in_twenty_crowds_what_it_says_alone(
    place: Place, folder_of: Callable[[str], Path], model: str, draw: int
) -> None:
    assert_same_in_a_crowd(place, folder_of(model), draw, (GREEDY, DRAWN)[draw % 2])


def test_a_batch_that_grows_and_shrinks_by_ones(place: Place, folder_of: Callable[[str], Path]) -> None:
    folder, prompt, most = folder_of("llama"), prompt_of(9), place.most
    expected = alone(place, folder, prompt, most)
    config = place.config(folder, enable_prefix_caching=False)
    for said in say(config, [prompt] * most, most, arrivals=list(range(most))):
        assert_same(expected, said)


WAYS = [
    *({"max_chunk_tokens": size} for size in (1, 63, 64, 65, 511)),
    {"block_size": 32, "max_chunk_tokens": 100},
    {"enable_prefix_caching": True, "max_chunk_tokens": 37},
    {"overlap": True, "policy": "prefill_first", "max_num_seqs": 2},
    {"overlap": False, "max_num_seqs": 3, "max_num_batched_tokens": 50},
]


def assert_same_in_a_way(place: Place, folder: Path, options: dict[str, Any]) -> None:
    """Sent twice: the second time whatever can be cached is."""
    prompts = [prompt_of(530), prompt_of(300), prompt_of(129)]
    if place.is_cpu and options.get("max_chunk_tokens") == 1:
        prompts = [prompt[:140] for prompt in prompts[:2]]  # a step a token
    if ("attention_backend", "contiguous") in place.options:
        options = {name: value for name, value in options.items() if name != "block_size"}
    said = say(place.config(folder, **options), prompts, 6, times=2)
    for prompt, found in zip(prompts, said, strict=True):
        assert_same(alone(place, folder, prompt, 6), found)


def ways() -> list[Any]:
    """In bfloat16 on a GPU all of them; elsewhere each way with one model, and on CPUs the rest by night."""
    chosen = {(name, index) for index, name in zip(range(len(WAYS)), cycle(MODELS), strict=False)}
    found = []
    for where, name, (index, way) in product([*ON_A_CPU, *ON_A_GPU], MODELS, enumerate(WAYS)):
        marks, place = ([], where) if isinstance(where, Place) else (list(where.marks), where.values[0])
        if place.is_cpu and not (place is CPU and (name, index) in chosen):
            marks = [pytest.mark.nightly]
        elif place.dtype == "float32" and (name, index) not in chosen:
            continue
        found.append(pytest.param(place, name, way, marks=marks))
    return found


@pytest.mark.parametrize(("place", "model", "options"), ways(), ids=str)
def test_neither_chunks_nor_blocks_nor_a_cached_prefix_show(
    folder_of: Callable[[str], Path], place: Place, model: str, options: dict[str, Any]
) -> None:
    assert_same_in_a_way(place, folder_of(model), options)


def test_a_preempted_request_says_what_it_would_have_said(place: Place, folder_of: Callable[[str], Path]) -> None:
    folder, prompts = folder_of("llama"), [prompt_of(60, seed) for seed in range(3)]
    blocks = {"block_size": 16, "num_blocks": 6}  # one request needs six at its end
    if ("attention_backend", "contiguous") in place.options:
        blocks = {}
    said = say(place.config(folder, max_num_seqs=3, enable_prefix_caching=False, **blocks), prompts, 24)
    for prompt, found in zip(prompts, said, strict=True):
        assert_same(alone(place, folder, prompt, 24), found)


def test_long_outputs_beside_others(place: Place, folder_of: Callable[[str], Path]) -> None:
    folder, length = folder_of("llama"), 40 if place.is_cpu else 512
    prompts = [prompt_of(size, size) for size in (5, 100)]
    for prompt, found in zip(prompts, say(place.config(folder), prompts, length), strict=True):
        assert_same(alone(place, folder, prompt, length), found)


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_scores_as_its_tokens_did_when_they_were_said_and_as_in_training(
    place: Place, folder_of: Callable[[str], Path], model: str
) -> None:
    """Decode, prefill, and the one model's forward pass over packed sequences."""
    llm = LLM(str(folder_of(model)), skip_tokenizer_init=True, **place.options_of(max_chunk_tokens=17))
    prompts = [prompt_of(40), prompt_of(7, 1), prompt_of(130, 2)]
    asked = replace(DRAWN, max_tokens=12, ignore_eos=True, logprobs=0)
    said = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked)
    sequences = [[*answer.prompt_token_ids, *answer.outputs[0].token_ids] for answer in said]
    expected = [[_only(place) for place in answer.outputs[0].logprobs or []] for answer in said]

    again = llm.generate(
        [{"prompt_token_ids": sequence} for sequence in sequences], SamplingParams(max_tokens=1, prompt_logprobs=0)
    )
    scored = [[_only(place) for place in (answer.prompt_logprobs or [])[-12:] if place] for answer in again]
    assert scored == expected

    for attend in attends(llm, place, [len(sequence) for sequence in sequences]):
        trained = scores_in_training(llm, place, sequences, attend)
        assert [scores[-12:].tolist() for scores in trained] == expected


def _only(place: dict[int, Any]) -> float:
    (entry,) = place.values()
    logprob: float = entry.logprob
    return logprob


def attends(llm: LLM, place: Place, lengths: Sequence[int]) -> list[Attend]:
    """Attention over these sequences: by the engine's backend, and in plain torch where that is the engine's."""
    config, specs = EngineConfig.of(model="-", **place.options_of()), llm.engine.model.attention_specs
    placement = placed(config.model, None)
    backend = back(config.execution, placement).attention(config.cache.attention_backend, specs, placement)
    found = [packed_on(backend, specs, lengths, dtype=placement.dtype, device=placement.device)]
    return [*found, packed(specs, lengths, fixed_order=True)] if place.is_cpu else found


def scores_in_training(llm: LLM, place: Place, sequences: Sequence[list[int]], attend: Attend) -> list[Tensor]:
    """Of each token but the first of each sequence, by one forward pass of the engine's own model."""
    config, model = EngineConfig.of(model="-", **place.options_of()), llm.engine.model
    ops = back(config.execution, placed(config.model, None)).operations(attend)
    device = torch.device(place.device)
    token_ids = torch.tensor([token for one in sequences for token in one], device=device)
    positions = torch.cat([torch.arange(len(one), device=device) for one in sequences])
    with torch.no_grad():
        hidden = model.forward(token_ids, positions, ops)
        logits = model.logits(hidden, torch.arange(len(token_ids), device=device), ops)
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    pieces = zip(logprobs.split([len(one) for one in sequences]), sequences, strict=True)
    return [rows[:-1].gather(1, torch.tensor(one[1:], device=device)[:, None])[:, 0] for rows, one in pieces]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_kernels_give_a_request_the_same_bits_in_company_and_in_chunks(tmp_path: Path) -> None:
    """The path of GPUs, in the interpreter: a step with prompts, decodes and a chunk of one token."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    folder = save_tiny_model(tmp_path, "llama", seed=5, attention_bias=True, mlp_bias=True, **shape)
    kernels = {"operations": "fused", "attention_backend": "paged_triton", "cpu_linear": "plain"}
    prompts = [prompt_of(2, 1), prompt_of(9), prompt_of(5, 2)]
    for is_on in (True, False):
        place = Place("cpu", "float32", 3, (*kernels.items(), ("batch_invariant", is_on)))
        expected = alone(place, folder, prompts[1], 2)
        found = say(place.config(folder, max_chunk_tokens=4), prompts, 2)[1]
        if is_on:
            assert_same(expected, found)
        else:
            assert not torch.equal(expected.logits, found.logits), "the mode does nothing"


@pytest.mark.parametrize(
    "place", [CPU, pytest.param(ON_A_CPU[2], marks=pytest.mark.nightly), ON_A_GPU[1]], ids=str
)  # tier A is of float32
@pytest.mark.parametrize("model", MODELS)
def test_it_says_what_huggingface_says(place: Place, folder_of: Callable[[str], Path], model: str) -> None:
    """Tier A: the order of sums is another one, and nothing else."""
    folder = folder_of(model)
    oracle = Oracle(open_checkpoint(str(folder)).tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    references = [oracle.generate(prompt_of(length, length), 8) for length in (3, 150, 21)]
    assert_safe_margins(references)
    config = place.config(folder, max_chunk_tokens=50)
    prompts = [list(reference.prompt_token_ids) for reference in references]
    assert_token_exact(references, say(config, prompts, 8))


@pytest.mark.gpu
def test_a_thousand_times_the_same_prompt_under_load_says_one_thing(folder_of: Callable[[str], Path]) -> None:
    folder, prompt, random = folder_of("llama"), prompt_of(50), Random(0)
    place = Place("cuda", "bfloat16", 256)
    mine = sorted(random.sample(range(2000), 1000))
    prompts = [prompt_of(random.randrange(1, 200), seed) for seed in range(2000)]
    for index in mine:
        prompts[index] = prompt
    arrivals = sorted(random.randrange(400) for _ in prompts)
    said = say(place.config(folder), prompts, 64, arrivals=arrivals)
    assert len({said[index].token_ids for index in mine}) == 1


def in_a_crowd(place: Place, folder: Path) -> None:
    assert_same_in_a_crowd(place, folder, 0, GREEDY)


def in_chunks(place: Place, folder: Path) -> None:
    assert_same_in_a_way(place, folder, {"max_chunk_tokens": 63})


@pytest.fixture
def counts_show(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU on which every product shows how many rows there are. On real ones what shows, and where, differs."""
    if place.is_cpu:
        for kind in (Linear, PrepackedLinear):
            monkeypatch.setattr(kind, "forward", showing(kind.forward))
        _alone.cache_clear()
    yield
    _alone.cache_clear()


def showing(forward: Any) -> Callable[[Any, Tensor], Tensor]:
    """By so few of its last bits that most tokens stay what they are."""
    return lambda linear, x: forward(linear, x) * (1 + len(x) * torch.finfo(x.dtype).eps / 8)


@pytest.mark.usefixtures("counts_show")
@pytest.mark.parametrize(
    ("place", "law"),
    [
        *product(ON_A_CPU, (in_a_crowd, in_chunks)),
        *(
            pytest.param(*where.values, law, marks=pytest.mark.gpu)
            for where, law in product(ON_A_GPU, (in_a_crowd, in_chunks))
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_without_the_mode_a_difference_shows(
    folder_of: Callable[[str], Path], place: Place, law: Callable[[Place, Path], None]
) -> None:
    law(place, folder_of("llama"))
    off = replace(place, options=(*place.options, ("batch_invariant", False)))
    with pytest.raises(AssertionError, match=r"not bitwise equal|At index \d+ diff"):  # logits, or a token itself
        law(off, folder_of("llama"))
