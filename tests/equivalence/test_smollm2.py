from collections.abc import Sequence

import pytest

from weft.config import EngineConfig
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
    contents = [prompt.content for prompt in STANDING_PROMPTS if prompt.name in NAMES]
    texts = [text if isinstance(text, str) else smollm2_tokenizer.chat(text) for text in contents]
    found = [smollm2_oracle.generate(smollm2_tokenizer.encode(text), MAX_NEW_TOKENS) for text in texts]
    assert len(found) == len(NAMES)
    assert_safe_margins(found)
    return found


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
