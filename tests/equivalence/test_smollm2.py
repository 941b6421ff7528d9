from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
from allpairspy import AllPairs

from weft.config import EngineConfig
from weft.inference.policies import known_policies
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.interface import Checkpoint
from weft.testing.continuation import Continuation
from weft.testing.exactness import assert_safe_margins, assert_token_exact
from weft.testing.oracle import Oracle
from weft.testing.prompts import STANDING_PROMPTS
from weft.testing.subject import Subject
from weft.tokenizer.hub import HubTokenizer

NAMES = ("one token", "one block of 16", "a block and one", "mid-word", "json", "chinese", "emoji", "chat, with system")
MAX_NEW_TOKENS = 20


@pytest.fixture(scope="module")
def references(smollm2_oracle: Oracle, smollm2_tokenizer: HubTokenizer) -> list[Continuation]:
    contents = [{prompt.name: prompt.content for prompt in STANDING_PROMPTS}[name] for name in NAMES]
    texts = [text if isinstance(text, str) else smollm2_tokenizer.chat(text) for text in contents]
    found = [smollm2_oracle.generate(smollm2_tokenizer.encode(text), MAX_NEW_TOKENS) for text in texts]
    assert_safe_margins(found)
    return found


# Chunks of one token are in `test_no_schedule_changes_what_smollm2_says`, and by all else in `test_paged.py`.
FACTORS = ((1, 16, 24), (None, 5, 17), (True, False), (None, "tight"), (8, 3))
PAGED = ("one token", "mid-word", "one block of 16", "a block and one")


def setting(policy: str, size: int, chunk: int | None, caching: bool, pool: str | None, rows: int) -> dict[str, Any]:
    return {
        "policy": policy,
        "block_size": size,
        "max_chunk_tokens": chunk,
        "enable_prefix_caching": caching,
        "num_blocks": -(-80 // size) if pool == "tight" else None,
        "max_num_seqs": rows,
    }


def real_pairs() -> list[dict[str, Any]]:
    """Settings of the paged engine in which every two values meet but for the policy: each policy occurs."""
    policies, rows = sorted(known_policies()), list(AllPairs([list(values) for values in FACTORS]))
    count = max(len(policies), len(rows))
    return [setting(policy, *row) for policy, row in islice(zip(cycle(policies), cycle(rows), strict=False), count)]


def pairs_with_policies() -> list[dict[str, Any]]:
    """Those in which every two values meet, policies too: 27."""
    return [setting(*values) for values in AllPairs([list(values) for values in (sorted(known_policies()), *FACTORS)])]


def name_of(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


def check_paged(checkpoint: Checkpoint, references: Sequence[Continuation], options: dict[str, Any]) -> None:
    """Prompts at the edges of a block, and the longest of them once more, so that prefixes are shared."""
    subject = Subject(EngineConfig.of(model="smollm2-135m", max_model_len=128, device="cpu", **options), checkpoint)
    asked = [first_tokens(reference, 8) for name, reference in zip(NAMES, references, strict=True) if name in PAGED]
    order = [*asked, max(asked, key=lambda reference: len(reference.prompt_token_ids))]
    params = [SamplingParams(temperature=0, max_tokens=8)] * len(order)
    assert_token_exact(order, subject.run([reference.prompt_token_ids for reference in order], params))


@pytest.mark.parametrize("options", real_pairs(), ids=name_of)
def test_paging_never_changes_what_smollm2_says(
    smollm2: Checkpoint, references: Sequence[Continuation], options: dict[str, Any]
) -> None:
    check_paged(smollm2, references, options)


@pytest.mark.nightly
@pytest.mark.parametrize("options", pairs_with_policies(), ids=name_of)
def test_paging_never_changes_what_smollm2_says_under_any_policy(
    smollm2: Checkpoint, references: Sequence[Continuation], options: dict[str, Any]
) -> None:
    check_paged(smollm2, references, options)


def test_real_weights_get_few_settings_and_every_policy() -> None:
    assert len(real_pairs()) <= 12
    assert {options["policy"] for options in real_pairs()} == set(known_policies())


def first_tokens(reference: Continuation, count: int) -> Continuation:
    """What the reference would be had it been asked for fewer tokens."""
    ended = len(reference.token_ids) <= count
    return replace(
        reference,
        token_ids=reference.token_ids[:count],
        logits=reference.logits[:count],
        finish_reason=reference.finish_reason if ended else "length",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 8},
        {"max_num_seqs": 8, "attention_backend": "contiguous", "policy": "static"},
        {"max_num_seqs": 3, "max_chunk_tokens": 16, "block_size": 24},
        {"max_num_seqs": 8, "num_blocks": 6},
        {"max_num_seqs": 8, "max_num_batched_tokens": 17},
        {"max_num_seqs": 8, "max_chunk_tokens": 1},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_no_schedule_changes_what_smollm2_says(
    smollm2: Checkpoint, references: Sequence[Continuation], options: dict[str, int], device: str
) -> None:
    subject = Subject(EngineConfig.of(model="smollm2-135m", max_model_len=128, device=device, **options), smollm2)
    params = [SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)] * len(references)
    answers = subject.run([reference.prompt_token_ids for reference in references], params)
    assert_token_exact(references, answers)


def test_plain_linear_layers_say_what_huggingface_says(smollm2: Checkpoint, references: Sequence[Continuation]) -> None:
    """Prepacked ones are the default of every other test here."""
    config = EngineConfig.of(model="smollm2-135m", max_model_len=128, device="cpu", cpu_linear="plain")
    params = [SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)] * len(references)
    answers = Subject(config, smollm2).run([reference.prompt_token_ids for reference in references], params)
    assert_token_exact(references, answers)


def test_standing_prompts_hold_every_shape_they_promise(smollm2_tokenizer: HubTokenizer) -> None:
    lengths = {
        prompt.name: len(smollm2_tokenizer.encode(prompt.content))
        for prompt in STANDING_PROMPTS
        if isinstance(prompt.content, str)
    }
    assert len(STANDING_PROMPTS) >= 32
    assert len({prompt.name for prompt in STANDING_PROMPTS}) == len(STANDING_PROMPTS)
    assert lengths["one token"] == 1
    assert lengths["one block of 16"] == 16
    assert (lengths["one block of 64"], lengths["a block and one"]) == (64, 65)
    assert lengths["700 tokens of prose"] >= 700
    assert lengths["1,000 tokens of numbers"] >= 1000
