"""The judge is tested: each fault is put in by hand, and the comparison that this folder rests on must convict it."""

from copy import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weft.attention.interface import AttentionSpec
from weft.config import EngineConfig
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint import gguf
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.source import open_checkpoint
from weft.models.llama import Llama
from weft.testing.continuation import Continuation
from weft.testing.exactness import Comparison, Verdict, assert_safe_margins, assert_token_exact, compare_exact
from weft.testing.oracle import Oracle
from weft.testing.subject import Subject
from weft.tokenizer.hub import HubTokenizer

TEXT = "The three largest planets of the solar system are"
LENGTH = 24


@pytest.fixture(scope="module")
def reference(smollm2_oracle: Oracle, smollm2_tokenizer: HubTokenizer) -> Continuation:
    found = smollm2_oracle.generate(smollm2_tokenizer.encode(TEXT), LENGTH)
    assert_safe_margins([found])
    return found


def judge(reference: Continuation, checkpoint: Checkpoint) -> Comparison:
    config = EngineConfig.of(model="smollm2-135m", max_num_seqs=1, max_model_len=64, device="cpu")
    subject = Subject(config, checkpoint)
    (answer,) = subject.run([reference.prompt_token_ids], [SamplingParams(temperature=0, max_tokens=LENGTH)])
    return compare_exact(reference, answer, noise=lambda: 0.0)


def assert_convicted(comparison: Comparison) -> None:
    assert comparison.verdict is Verdict.DIFFERENT
    assert comparison.max_logit_difference > 3e-3  # thrice the tolerance: no conviction by a hair


def test_without_a_fault_the_judge_acquits(reference: Continuation, smollm2: Checkpoint) -> None:
    assert judge(reference, smollm2).verdict is Verdict.EQUAL


def test_skipping_the_qk_permutation_is_convicted(reference: Continuation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "unpermute", lambda weights, num_heads: weights)
    assert_convicted(judge(reference, open_checkpoint("smollm2-135m")))


def test_swapping_gate_and_up_is_convicted(reference: Continuation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gguf._INNER, "ffn_gate", "mlp.up_proj")
    monkeypatch.setitem(gguf._INNER, "ffn_up", "mlp.gate_proj")
    assert_convicted(judge(reference, open_checkpoint("smollm2-135m")))


def test_an_epsilon_ten_times_too_small_is_convicted_by_logits_alone(
    reference: Continuation, smollm2: Checkpoint
) -> None:
    checkpoint = copy(smollm2)
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(1e-5)
    checkpoint.config = {**checkpoint.config, "rms_norm_eps": 1e-6}
    comparison = judge(reference, checkpoint)
    assert comparison.first_difference is None, "token equality would acquit: this fault flips no token here"
    assert comparison.verdict is Verdict.DIFFERENT


def test_positions_off_by_one_after_the_prompt_are_convicted(
    reference: Continuation, smollm2: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, prompt_length = Llama.forward, len(reference.prompt_token_ids)

    def shifted(self: Llama, token_ids: Tensor, positions: Tensor, ops: object) -> object:
        return forward(self, token_ids, positions + (positions >= prompt_length).long(), ops)

    monkeypatch.setattr(Llama, "forward", shifted)
    assert_convicted(judge(reference, smollm2))


def test_a_scale_one_percent_off_is_convicted(
    reference: Continuation, smollm2: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = Llama.attention_spec

    def off(self: Llama, layer: int, window: int | None = None) -> AttentionSpec:
        spec = declared(self, layer, window)
        return replace(spec, scale=spec.scale * 1.01)

    monkeypatch.setattr(Llama, "attention_spec", off)
    assert_convicted(judge(reference, smollm2))


def test_positions_all_shifted_alike_are_no_fault_under_rotation(
    reference: Continuation, smollm2: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Llama.forward

    def shifted(self: Llama, token_ids: Tensor, positions: Tensor, ops: object) -> object:
        return forward(self, token_ids, positions + 7, ops)

    monkeypatch.setattr(Llama, "forward", shifted)
    assert judge(reference, smollm2).verdict is Verdict.EQUAL


@pytest.mark.parametrize("fault", ["token", "shorter", "longer", "reason", "logit", "nan"])
def test_every_kind_of_difference_in_an_answer_is_seen(reference: Continuation, fault: str) -> None:
    tokens, logits = reference.token_ids, reference.logits
    wrong = {
        "token": replace(reference, token_ids=(*tokens[:-1], tokens[-1] + 1)),
        "shorter": replace(reference, token_ids=tokens[:-1], logits=logits[:-1]),
        "longer": replace(reference, token_ids=(*tokens, 0), logits=torch.cat([logits, logits[:1]])),
        "reason": replace(reference, finish_reason="stop" if reference.finish_reason == "length" else "length"),
        "logit": replace(reference, logits=logits + torch.eye(*logits.shape) * 2e-3),
        "nan": replace(reference, logits=logits.index_fill(0, torch.tensor([5]), torch.nan)),
    }[fault]
    assert_token_exact([reference], [reference])
    with pytest.raises(AssertionError, match="not token-exact"):
        assert_token_exact([reference], [wrong])
