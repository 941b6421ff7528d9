"""Backend x policy x block x chunk x prefix x preemption x arrival order x overlap: none changes what a model says.

The default run takes a sample in which every two values of different factors meet, models too; `-m nightly` takes the
product.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import jaxtyping
import pytest
import torch
from allpairspy import AllPairs

from weft.config import EngineConfig
from weft.inference.policies import known_policies
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.continuation import Continuation
from weft.testing.exactness import assert_safe_margins, assert_token_exact
from weft.testing.oracle import Oracle
from weft.testing.subject import Subject
from weft.testing.tiny import save_tiny_model

MAX_NEW_TOKENS = 12
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "policy": tuple(sorted(known_policies())),
    "block_size": (1, 2, 16, 24, 256),
    "chunk": ("whole", "1", "P-1", "P", "P+1", "512"),
    "backend": ("paged_gather", "contiguous"),
    "arrival": ("together", "reversed", "one by one"),
    "prefix_caching": (True, False),
    "pool": ("ample", "tight"),  # tight: enough for one request, so that two preempt each other
    "max_num_seqs": (1, 3, 8),
    "overlap": (False, True),
}


@dataclass(frozen=True)
class Setting:
    policy: str
    block_size: int
    chunk: str
    backend: str
    arrival: str
    prefix_caching: bool
    pool: str
    max_num_seqs: int
    overlap: bool

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))

    def options(self, longest: int) -> dict[str, Any]:
        size = self.block_size
        chunks = {"whole": None, "1": 1, "P-1": max(1, size - 1), "P": size, "P+1": size + 1, "512": 512}
        options = {
            "attention_backend": self.backend,
            "policy": self.policy,
            "max_chunk_tokens": chunks[self.chunk],
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": self.prefix_caching,
            "overlap": self.overlap,
        }
        if self.backend == "paged_gather":  # a contiguous row takes no block options
            enough_for_one = -(-(longest + MAX_NEW_TOKENS - 1) // size)
            options |= {"block_size": size, "num_blocks": enough_for_one if self.pool == "tight" else None}
        return options


def is_affordable(values: list[Any]) -> bool:
    """All pairs but one: prompts of 512 tokens, a token a step, are for the night."""
    return len(values) < 3 or (values[1], values[2]) != (256, "1")


def pairwise() -> list[tuple[str, Setting]]:
    """A model is one more factor: it meets every value of the others."""
    rows = AllPairs([*FACTORS.values(), list(MODELS)], filter_func=is_affordable)
    return sorted(((model, Setting(*values)) for *values, model in rows), key=lambda row: row[0])


@pytest.fixture(scope="module", params=MODELS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, config = MODELS[request.param]
    return save_tiny_model(
        tmp_path_factory.mktemp(request.param), model_type, seed=3, max_position_embeddings=640, **config
    )


@pytest.fixture(scope="module")
def references(folder: Path) -> Callable[[int], list[Continuation]]:
    """For a block size P: prompts that begin alike for 1, P - 1, P, P + 1 and 2P tokens, two of them equal."""
    oracle = Oracle(open_checkpoint(str(folder)).tokenizer, dtype=torch.float32, device=torch.device("cpu"))

    @cache
    def of(size: int) -> list[Continuation]:
        generator = torch.Generator().manual_seed(size)
        shared, *rests = (
            torch.randint(131, (length,), generator=generator).tolist() for length in (2 * size, 3, 1, 9, 2, 17)
        )
        prompts = [
            shared[:length] + rest for length, rest in zip((1, size - 1, size, size + 1, 2 * size), rests, strict=True)
        ]
        prompts += [shared, shared, shared[:1]]
        found = [oracle.generate(prompt, MAX_NEW_TOKENS) for prompt in prompts]
        assert_safe_margins(found)
        return found

    return of


def check(folder: Path, references: list[Continuation], setting: Setting) -> None:
    """Everything is sent twice: the second time whatever can be cached is, and annotations are not checked."""
    order = list(references)
    if setting.arrival == "reversed":
        order.reverse()
    arrivals = None
    if setting.arrival == "one by one":
        arrivals = sorted(Random(str(setting)).choices(range(20), k=len(order)))
    longest = max(len(reference.prompt_token_ids) for reference in references)
    config = EngineConfig.of(model=str(folder), device="cpu", **setting.options(longest))
    subject = Subject(config, open_checkpoint(str(folder)))
    params = [SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)] * len(order)
    prompts = [reference.prompt_token_ids for reference in order]
    assert_token_exact(order, subject.run(prompts, params, arrivals=arrivals))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run it
        assert_token_exact(order, subject.run(prompts, params, arrivals=arrivals))


@pytest.mark.parametrize(("folder", "setting"), pairwise(), indirect=["folder"], ids=str)
def test_paging_never_changes_what_a_model_says(
    folder: Path, references: Callable[[int], list[Continuation]], setting: Setting
) -> None:
    check(folder, references(setting.block_size), setting)


@pytest.mark.nightly
@pytest.mark.parametrize("block_size", FACTORS["block_size"])
@pytest.mark.parametrize("policy", FACTORS["policy"])
def test_the_whole_product_never_changes_what_a_model_says(
    folder: Path, references: Callable[[int], list[Continuation]], policy: str, block_size: int
) -> None:
    for values in product(*list(FACTORS.values())[2:]):
        check(folder, references(block_size), Setting(policy, block_size, *values))
