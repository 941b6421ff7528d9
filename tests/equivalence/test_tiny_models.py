from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.config import EngineConfig
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.continuation import Continuation
from weft.testing.exactness import assert_safe_margins, assert_token_exact
from weft.testing.oracle import Oracle
from weft.testing.subject import Subject
from weft.testing.tiny import save_tiny_model

MAX_NEW_TOKENS = 24
WINDOW = 8


@dataclass(frozen=True)
class Case:
    name: str
    model_type: str = "llama"
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)


def rope(rope_type: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": rope_type, **options}}


CASES = [
    Case("llama"),
    Case("gqa-1", config={"num_key_value_heads": 6}),
    Case("gqa-8", config={"num_attention_heads": 8, "num_key_value_heads": 1}),
    Case("tied", config={"tie_word_embeddings": True}),
    Case("attention-bias", config={"attention_bias": True}),
    Case("mlp-bias", config={"mlp_bias": True}),
    Case("several-eos", config={"eos_token_id": [3, 57, 90]}),
    Case("epsilon", config={"rms_norm_eps": 1e-2}),
    Case("theta", config=rope("default", rope_theta=500.0)),
    Case("rope-linear", config=rope("linear", factor=4.0)),
    Case("rope-dynamic", config=rope("dynamic", factor=2.0)),
    Case(
        "rope-llama3",
        config=rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    ),
    Case("rope-yarn", config=rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    Case("qwen3", model_type="qwen3"),
    Case("qwen3-bias-tied", model_type="qwen3", config={"attention_bias": True, "tie_word_embeddings": True}),
    Case(
        "qwen3-window",
        model_type="qwen3",
        config={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    Case("mistral", model_type="mistral", config={"sliding_window": WINDOW}),
    Case("mistral-no-window", model_type="mistral", config={"sliding_window": None}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case: Case = request.param
    return save_tiny_model(tmp_path_factory.mktemp(case.name), case.model_type, seed=case.seed, **case.config)


@pytest.fixture(scope="module")
def references(folder: Path) -> list[Continuation]:
    location = open_checkpoint(str(folder)).tokenizer
    oracle = Oracle(location, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    lengths = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3, 40)
    prompts = [torch.randint(131, (length,), generator=generator).tolist() for length in lengths]
    found = [oracle.generate(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    assert_safe_margins(found)
    variety = sorted(len(set(reference.token_ids)) for reference in found)
    assert variety[len(found) // 2] >= 8, f"texts of {variety} different tokens show little"
    return found


# Backend, policy, chunk, and how linear layers multiply: each backend with either of these.
SETTINGS = [
    ("contiguous", "static", None, "plain"),
    ("contiguous", "static", 1, "prepacked"),
    ("contiguous", "fcfs", WINDOW - 1, "prepacked"),
    ("paged_gather", "fcfs", None, "prepacked"),
    ("paged_gather", "fcfs", WINDOW + 1, "plain"),
]


@pytest.mark.parametrize(
    ("attention_backend", "policy", "max_chunk_tokens", "cpu_linear"),
    SETTINGS,
    ids=["-".join(map(str, setting[:3])) for setting in SETTINGS],
)
def test_every_architecture_equals_huggingface_in_any_chunks(
    folder: Path,
    references: list[Continuation],
    attention_backend: str,
    policy: str,
    max_chunk_tokens: int | None,
    cpu_linear: str,
    device: str,
) -> None:
    config = EngineConfig.of(
        model=str(folder),
        device=device,
        attention_backend=attention_backend,
        policy=policy,
        max_chunk_tokens=max_chunk_tokens,
        cpu_linear=cpu_linear if device == "cpu" else "auto",
        max_num_seqs=4,
    )
    params = [SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)] * len(references)
    subject = Subject(config, open_checkpoint(str(folder)))
    assert_token_exact(references, subject.run([reference.prompt_token_ids for reference in references], params))


def test_some_reference_ends_by_an_eos_id_and_some_by_length(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "several-eos")
    folder = save_tiny_model(tmp_path, case.model_type, seed=case.seed, **case.config)
    oracle = Oracle(open_checkpoint(str(folder)).tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    ends = {oracle.generate([token], MAX_NEW_TOKENS).finish_reason for token in range(12)}
    assert ends == {"stop", "length"}
