"""The kernels under a whole engine: HuggingFace's tokens, mixed steps, chunks, shared blocks and preemption included.

Without a GPU they run in Triton's interpreter, on a tiny model and few tokens; on one, real weights as well.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from weft.attention import PREFERRED, find_backend
from weft.attention.interface import AttentionSpec
from weft.config import EngineConfig
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.exactness import assert_safe_margins, assert_token_exact
from weft.testing.oracle import Oracle
from weft.testing.prompts import STANDING_PROMPTS
from weft.testing.subject import Subject
from weft.testing.tiny import save_tiny_model
from weft.testing.verify import NamedPrompt, verify
from weft.tokenizer.hub import HubTokenizer

MAX_NEW_TOKENS = 5
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "mistral-window": ("mistral", {"num_hidden_layers": 2, "sliding_window": 8}),
    "qwen3-window": (
        "qwen3",
        {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        # Chunks, preemption, and what was computed is found again. A short context has few parts to merge.
        {"block_size": 8, "num_blocks": 4, "max_chunk_tokens": 9, "max_model_len": 32},
        {"block_size": 16, "operations": "fused", "max_chunk_tokens": 9},  # every step a program on the device alone
    ],
    ids=str,
)
def test_the_kernels_say_what_huggingface_says(
    model: str, options: dict[str, Any], tmp_path: Path, device: str
) -> None:
    model_type, config = MODELS[model]
    folder = str(save_tiny_model(tmp_path, model_type, seed=3, **config))
    checkpoint = open_checkpoint(folder)
    oracle = Oracle(checkpoint.tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(131, (24,), generator=generator).tolist()
    prompts = [shared[:1], shared[:17], shared, shared[:16] + shared[:2]]
    references = [oracle.generate(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    assert_safe_margins(references)
    engine = EngineConfig.of(
        model=folder, device=device, dtype="float32", attention_backend="paged_triton", max_num_seqs=3, **options
    )
    params = [SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)] * len(prompts)
    assert_token_exact(references, Subject(engine, checkpoint).run(prompts, params))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"block_size": 16, "max_chunk_tokens": 100}, {"block_size": 128}], ids=str)
def test_smollm2_over_the_standing_prompts(
    smollm2: Checkpoint, smollm2_tokenizer: HubTokenizer, options: dict[str, Any]
) -> None:
    texts = [
        (prompt.name, prompt.content if isinstance(prompt.content, str) else smollm2_tokenizer.chat(prompt.content))
        for prompt in STANDING_PROMPTS
    ]
    prompts = [NamedPrompt(name=name, token_ids=tuple(smollm2_tokenizer.encode(text))) for name, text in texts]
    assert len(prompts) >= 32
    config = EngineConfig.of(
        model="smollm2-135m",
        device="cuda",
        dtype="float32",
        attention_backend="paged_triton",
        max_num_seqs=16,
        max_model_len=2048,
        **options,
    )
    result = verify(config, smollm2, prompts, max_new_tokens=32)
    assert result.passed, [(prompt.name, c.verdict) for prompt, c in zip(prompts, result.comparisons, strict=True)]


def test_auto_takes_the_kernels_on_a_gpu_only() -> None:
    backend = find_backend("paged_triton")
    spec = AttentionSpec(num_query_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
    assert ("paged_triton" in PREFERRED) == torch.cuda.is_available()
    if torch.cuda.is_available():
        assert PREFERRED[0] == "paged_triton"
        assert backend.supports(spec, torch.bfloat16, torch.device("cuda")) is None
    else:
        assert "bfloat16" in (backend.supports(spec, torch.bfloat16, torch.device("cpu")) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 300}, "head_dim=300"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"num_kv_heads": 4}, "num_query_heads=6"),
        ({"cache_group": 1}, "cache group"),
    ],
)
def test_a_layer_that_cannot_run_is_refused_with_its_number(change: dict[str, int], reason: str) -> None:
    spec = AttentionSpec(**({"num_query_heads": 6, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25} | change))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert reason in (find_backend("paged_triton").supports(spec, torch.float32, device) or "")
