"""What a model's authors set in its `generation_config.json` ends texts and rules out tokens as HuggingFace does."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.test_llm import save_text_model
from weft import LLM

PROMPTS = ["row by row", "warp", "over and under the weft"]
LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose texts are ASCII: stop strings with U+FFFD are seen elsewhere by HuggingFace."""
    folder = save_text_model(tmp_path_factory.mktemp("defaults"), bos=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(model.config.vocab_size)]
    with torch.no_grad():
        model.lm_head.weight[[not (text.isascii() and text.isprintable() and text) for text in texts]] = 0.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def both(folder: Path, tmp_path: Path) -> Callable[..., tuple[list[list[int]], list[list[int]]]]:
    """Token ids of weft's answers and of HuggingFace's, each without a word of sampling from the caller."""

    def answers(**fields: Any) -> tuple[list[list[int]], list[list[int]]]:
        target = copytree(folder, tmp_path / str(len(list(tmp_path.iterdir()))))
        fields = {"do_sample": False, "max_new_tokens": LENGTH, "pad_token_id": 0, **fields}
        (target / "generation_config.json").write_text(json.dumps(fields))
        outputs = LLM(str(target), device="cpu").generate(PROMPTS, use_tqdm=False)
        tokenizer = AutoTokenizer.from_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        expected = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), tokenizer=tokenizer)
            expected.append(whole[0, ids.shape[1] :].tolist())
        return [output.outputs[0].token_ids for output in outputs], expected

    return answers


def test_lengths_and_stop_strings_of_the_authors_end_texts_as_huggingface_does(
    folder: Path, both: Callable[..., tuple[list[list[int]], list[list[int]]]]
) -> None:
    plain, expected = both(eos_token_id=None)
    assert plain == expected
    assert {len(answer) for answer in plain} == {LENGTH}
    early = sorted({answer[place] for place, answer in enumerate(plain, start=2)})

    soon, expected = both(eos_token_id=early)
    assert soon == expected
    assert max(map(len, soon)) < 8

    for least in (8, LENGTH):
        held, expected = both(eos_token_id=early, min_new_tokens=least, min_length=99)
        assert held == expected
        assert min(map(len, held)) >= least

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.decode(answer) for answer in plain]
    assert all(text.isascii() for text in texts)
    within = [text[len(text) // 2 :][:5] for text in texts]  # across tokens
    for stop in (within, within[0]):
        stopped, expected = both(eos_token_id=None, stop_strings=stop)
        assert stopped == expected
        assert len(stopped[0]) < LENGTH
        assert within[0] not in tokenizer.decode(stopped[0][-1:])


def test_tokens_that_the_authors_rule_out_are_not_said_as_in_huggingface(
    both: Callable[..., tuple[list[list[int]], list[list[int]]]],
) -> None:
    plain, _ = both(eos_token_id=None)
    first, pair = plain[0][0], plain[1][1:3]

    said, expected = both(eos_token_id=None, suppress_tokens=[first, -1], bad_words_ids=[pair, plain[2][:3]])
    assert said == expected
    assert all(first not in answer for answer in said)
    assert all(answer[place : place + 2] != pair for answer in said for place in range(LENGTH))
    assert [new == old for new, old in zip(said, plain, strict=True)] == [False] * 3

    # An EOS among the bad words is let pass, and ends; suppressed it is never said.
    eos = [plain[0][2], plain[1][2]]
    said, expected = both(eos_token_id=eos, bad_words_ids=[[token] for token in eos])
    assert said == expected
    assert {said[0][-1], said[1][-1]} <= set(eos)
    assert max(len(said[0]), len(said[1])) < 8
    said, expected = both(eos_token_id=eos, suppress_tokens=eos)
    assert said == expected
    assert {len(answer) for answer in said} == {LENGTH}
