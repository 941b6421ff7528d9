"""Backend x policy x block size x chunk x prefix x preemption x arrival order: none of it changes what a model says."""

from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from weft.config import EngineConfig
from weft.inference.policies import known_policies
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.continuation import Continuation
from weft.testing.exactness import assert_safe_margins, assert_token_exact
from weft.testing.oracle import Oracle
from weft.testing.subject import Subject
from weft.testing.tiny import save_tiny_model

BLOCK_SIZES = (1, 2, 16, 24, 256)
MAX_NEW_TOKENS = 12
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
}


@pytest.fixture(scope="module", params=MODELS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, config = MODELS[request.param]
    return save_tiny_model(tmp_path_factory.mktemp(request.param), model_type, seed=3, **config)


@pytest.fixture(scope="module")
def references(folder: Path) -> list[Continuation]:
    """Prompts that begin alike for 1, P - 1, P, P + 1 and 2P tokens of P = 16, two of them equal."""
    oracle = Oracle(open_checkpoint(str(folder)).tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    shared, *rests = (torch.randint(131, (length,), generator=generator).tolist() for length in (40, 3, 1, 9, 2, 17))
    prompts = [shared[:length] + rest for length, rest in zip((1, 15, 16, 17, 32), rests, strict=True)]
    prompts += [shared[:32], shared[:32], shared[:1]]
    found = [oracle.generate(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    assert_safe_margins(found)
    return found


def settings() -> list[dict[str, Any]]:
    """Every block size with every policy, and everything else in turn, so that pairs meet."""
    chunks = cycle([None, 1, "P-1", "P", "P+1", 512])
    pools, caching, rows = cycle(["ample", "tight"]), cycle([True, True, False]), cycle([4, 3, 8, 1, 2])
    return [
        {
            "block_size": block_size,
            "policy": policy,
            "chunk": next(chunks),
            "pool": next(pools),
            "enable_prefix_caching": next(caching),
            "max_num_seqs": next(rows),
        }
        for policy in sorted(known_policies())
        for block_size in BLOCK_SIZES
    ]


def options_of(setting: dict[str, Any], longest: int) -> dict[str, Any]:
    size = setting["block_size"]
    chunk = {"P-1": max(1, size - 1), "P": size, "P+1": size + 1}.get(setting["chunk"], setting["chunk"])
    enough_for_one = -(-(longest + MAX_NEW_TOKENS - 1) // size)
    return {
        "attention_backend": "paged_gather",
        "block_size": size,
        "num_blocks": enough_for_one if setting["pool"] == "tight" else None,
        "policy": setting["policy"],
        "max_chunk_tokens": chunk,
        "enable_prefix_caching": setting["enable_prefix_caching"],
        "max_num_seqs": setting["max_num_seqs"],
    }


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: "-".join(map(str, setting.values())))
def test_paging_never_changes_what_a_model_says(
    folder: Path, references: list[Continuation], setting: dict[str, Any]
) -> None:
    longest = max(len(reference.prompt_token_ids) for reference in references)
    config = EngineConfig.of(model=str(folder), device="cpu", **options_of(setting, longest))
    subject = Subject(config, open_checkpoint(str(folder)))
    order = Random(str(setting)).sample(references, len(references))
    params = [SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)] * len(order)
    for _ in range(2):  # the second time everything that can be cached is
        assert_token_exact(order, subject.run([reference.prompt_token_ids for reference in order], params))
