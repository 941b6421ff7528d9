"""Tier A with processors: greedy, in float32, token-exact with HuggingFace's `generate` of the same settings.

All requests run in one batch, each with its own settings; HuggingFace runs them one by one.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from weft.config import EngineConfig
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.exactness import LOGIT_TOLERANCE, SAFE_MARGIN
from weft.testing.oracle import Oracle
from weft.testing.subject import Subject
from weft.testing.tiny import SHAPE, save_tiny_model

VOCAB = SHAPE["vocab_size"]
EOS = [3, 57, 90]
MAX_NEW_TOKENS = 24
LENGTHS = (1, 9, 30)  # of the prompts


class Penalty(LogitsProcessor):
    """Presence and frequency, which HuggingFace does not have, in the OpenAI API's words."""

    def __init__(self, num_prompt_tokens: int, *, presence: float, frequency: float) -> None:
        self._start, self._presence, self._frequency = num_prompt_tokens, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self._start :].tolist()).items():
            scores[0, token] -= self._frequency * count + self._presence
        return scores


@dataclass(frozen=True)
class Case:
    """weft's settings, HuggingFace's, and how many of the texts the settings change at least."""

    name: str
    weft: dict[str, Any]
    huggingface: dict[str, Any] = field(default_factory=dict)
    changes: int = 1


ODD = [*range(1, VOCAB, 2), *EOS]
BIASES = {7: 12.0, 8: -100.0, 57: 3.0, **dict.fromkeys(range(60, 90), -9.0)}
SEQUENCES = {(token,): bias for token, bias in BIASES.items()}


def cases(texts: list[list[int]]) -> list[Case]:
    """texts: what is said to each prompt without any settings; pieces of them become bad words."""
    words = [text[start : start + 3] for text in texts for start in (0, 4, 5)] + [
        [token] for token in range(0, VOCAB, 9)
    ]
    return [
        Case("plain", {}, changes=0),
        Case("min_tokens", {"min_tokens": 20}, {"min_new_tokens": 20}),
        Case("repetition_penalty", {"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
        Case("repetition below one", {"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        Case("presence_penalty", {"presence_penalty": 2.0}),
        Case("frequency_penalty", {"frequency_penalty": 1.7}),
        Case("frequency below none", {"frequency_penalty": -0.9, "presence_penalty": -1.0}),
        Case("logit_bias", {"logit_bias": BIASES}, {"sequence_bias": SEQUENCES}),
        Case("bad_words", {"bad_words": words}, {"bad_words_ids": words}),
        Case("bad words of three tokens", {"bad_words": words[:9]}, {"bad_words_ids": words[:9]}, changes=len(LENGTHS)),
        Case("allowed_token_ids", {"allowed_token_ids": ODD}, {"suppress_tokens": sorted({*range(VOCAB)} - {*ODD})}),
        Case(
            "all",
            {
                "min_tokens": 12,
                "repetition_penalty": 1.3,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "logit_bias": BIASES,
                "bad_words": words,
                "allowed_token_ids": [*range(100)],
            },
            {
                "min_new_tokens": 12,
                "repetition_penalty": 1.3,
                "sequence_bias": SEQUENCES,
                "bad_words_ids": words,
                "suppress_tokens": list(range(100, VOCAB)),
            },
        ),
    ]


@dataclass(frozen=True)
class Expected:
    prompt: list[int]
    case: Case
    token_ids: list[int]
    logits: Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("sampling"), "llama", seed=5, eos_token_id=EOS)


def generate(oracle: Oracle, prompt: list[int], case: Case) -> Expected:
    penalty = Penalty(
        len(prompt),
        presence=case.weft.get("presence_penalty", 0.0),
        frequency=case.weft.get("frequency_penalty", 0.0),
    )
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=EOS,
        pad_token_id=EOS[0],
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **case.huggingface,
    )
    ids = torch.tensor([prompt])
    result = oracle.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        logits_processor=LogitsProcessorList([penalty]),
    )
    best, second = torch.cat(result.scores).topk(2).values.unbind(1)
    assert (best - second).min() > SAFE_MARGIN, f"{case.name}: choose another seed or prompt"
    return Expected(prompt, case, result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Expected]:
    """Every prompt with every case; no text hangs on noise, and every setting is seen to act."""
    oracle = Oracle(open_checkpoint(str(folder)).tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    plain = [generate(oracle, prompt, Case("plain", {})).token_ids for prompt in prompts]
    found = []
    for case in cases(plain):
        answers = [generate(oracle, prompt, case) for prompt in prompts]
        changed = sum(one.token_ids != text for one, text in zip(answers, plain, strict=True))
        assert changed >= case.changes, f"{case.name} changes {changed} texts"
        found += answers
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "paged_gather", "max_num_seqs": 40},
        {"attention_backend": "paged_gather", "max_num_seqs": 5, "max_chunk_tokens": 4, "overlap": True},
        {"attention_backend": "paged_gather", "max_num_seqs": 6, "block_size": 4, "num_blocks": 24},
        {"attention_backend": "contiguous", "max_num_seqs": 7, "max_num_batched_tokens": 16, "policy": "static"},
    ],
    ids=["one batch", "chunks and overlap", "preempted", "contiguous"],
)
def test_greedy_with_processors_equals_huggingface(
    folder: Path, expected: list[Expected], options: dict[str, Any], device: str
) -> None:
    config = EngineConfig.of(model=str(folder), device=device, dtype="float32", **options)
    subject = Subject(config, open_checkpoint(str(folder)))
    params = [SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS, **one.case.weft) for one in expected]
    answers = subject.run([one.prompt for one in expected], params)
    for one, answer in zip(expected, answers, strict=True):
        assert list(answer.token_ids) == one.token_ids, one.case.name
        assert (answer.logits - one.logits).abs().max() < LOGIT_TOLERANCE, "what is watched is raw"
        assert answer.finish_reason == ("stop" if one.token_ids[-1] in EOS else "length")
