"""Somebody else's family before the laws: the sound one is acquitted, each faulty one is convicted by its law."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.errors import UnsupportedCheckpointError
from weft.layers.linear import Linear
from weft.layers.operations import Hidden, Operations
from weft.layers.weights import WeightSlots
from weft.models.family import Family
from weft.models.llama import FAMILY as LLAMA
from weft.models.llama import Llama, LlamaConfig
from weft.testing import run_model_conformance
from weft.testing.conformance.model import _Judged
from weft.testing.conformance.suite import ConformanceError
from weft.testing.finding import Outcome

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """A foreign family: Llama with biases on queries, keys and values alone. Windows it refuses."""

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        if config.get("use_sliding_window"):
            raise UnsupportedCheckpointError("use_sliding_window=True is not supported")
        return super().fields_of(dict(config) | {"attention_bias": True, "mlp_bias": False})


class Qwen2(Llama):
    def __init__(self, config: LlamaConfig, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, max_positions, dtype, device)
        for layer in self.layers:
            width = config.num_attention_heads * config.head_dim
            layer.output = Linear(width, (config.hidden_size,), dtype=dtype, device=device)


QWEN2 = Family(model_type="qwen2", read_config=Qwen2Config.read, build=Qwen2)


@dataclass(frozen=True, kw_only=True)
class IgnoresWindows(Qwen2Config):
    """Full attention, whatever the config says."""

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_of(dict(config) | {"use_sliding_window": False})


class WithoutBias(Llama):
    """vllm#3767: biases of the checkpoint are dropped."""

    def weight_slots(self) -> WeightSlots:
        slots = super().weight_slots()
        for name in [name for name in slots if name.endswith("k_proj.bias")]:
            slots._views.pop(name).zero_()
        return slots


class AnySlots(WeightSlots):
    def fill(self, tensors: Any, *, ignored: tuple[str, ...] = ()) -> None:
        for name, tensor in tensors:
            if name in self._views:
                self._fill_one(name, tensor)


class TakesWhatComes(Llama):
    """vllm#53019: a model loads without a word, whatever is missing."""

    def weight_slots(self) -> WeightSlots:
        slots = AnySlots()
        slots.__dict__ |= super().weight_slots().__dict__
        return slots


class PositionsOfTheStep(Llama):
    """unsloth#3699: where a token stands in the step is taken for where it stands in its sequence."""

    def forward(
        self, token_ids: Int[Tensor, "T_total"], positions: Int[Tensor, "T_total"], ops: Operations[Hidden]
    ) -> Hidden:
        return super().forward(token_ids, torch.arange(len(token_ids)), ops)


class RoundsLogits(Llama):
    def logits(self, hidden: Hidden, rows: Int[Tensor, "R"], ops: Operations[Hidden]) -> Float[Tensor, "R V"]:
        return super().logits(hidden, rows, ops).bfloat16().float()


@dataclass(frozen=True, kw_only=True)
class OneEpsilon(LlamaConfig):
    """A field that everybody leaves alone, and so nobody reads: no token shows it, logits do."""

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_of(config) | {"rms_norm_eps": 1e-6}


def any_activation(config: Mapping[str, Any]) -> LlamaConfig:
    """What stands in `hidden_act` is not looked at."""
    return LlamaConfig.read(dict(config) | {"hidden_act": "silu"})


class TwoRopes(LlamaConfig):
    """Types of rotation that it does not know are taken for the plain one."""

    unknown = ("linear", "yarn")

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        rope = config["rope_parameters"]
        known = rope["rope_type"] not in cls.unknown
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return super().fields_of(dict(config) | {"rope_parameters": rope if known else plain})


class OneRopeMore(TwoRopes):
    unknown = ("yarn",)


class Silent(LlamaConfig):
    """A model of the usual size where its config does not say."""

    @classmethod
    def fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_of({"vocab_size": 96} | dict(config))


EQUAL = "logits equal huggingface for every field that changes them"
FAULTS = {
    "biases": (EQUAL, replace(LLAMA, build=WithoutBias)),
    "epsilon": (EQUAL, replace(LLAMA, read_config=OneEpsilon.read)),
    "activation": (EQUAL, replace(LLAMA, read_config=any_activation)),
    "linear rope": (EQUAL, replace(LLAMA, read_config=TwoRopes.read)),
    "yarn rope": (EQUAL, replace(LLAMA, read_config=OneRopeMore.read)),
    "rounded": (EQUAL, replace(LLAMA, build=RoundsLogits)),
    "loading": ("every tensor of a checkpoint has its place", replace(LLAMA, build=TakesWhatComes)),
    "positions": ("chunks never change logits", replace(LLAMA, build=PositionsOfTheStep)),
    "windows": (EQUAL, replace(QWEN2, read_config=IgnoresWindows.read)),
    "default": ("a missing field is an error that names it", replace(LLAMA, read_config=Silent.read)),
}


def test_a_foreign_one_is_acquitted_of_all_that_its_config_can_say() -> None:
    report = run_model_conformance(QWEN2)
    assert not report.not_judged
    refused = "windows above a layer .*: use_sliding_window=True is not supported"
    assert re.search(f"refused, so not judged: .*{refused}", report.laws(Outcome.HOLDS)[EQUAL])


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_one_is_convicted_by_its_law_and_the_config_is_shown(name: str) -> None:
    law, family = FAULTS[name]
    with pytest.raises(ConformanceError) as caught:
        run_model_conformance(family)
    broken = caught.value.report.laws(Outcome.BROKEN)
    assert law in broken
    assert broken[law].startswith("given ")


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("granite", {"multiplier of scores", "multiplier of embeddings", "multiplier of residuals", "scale of logits"}),
        # Its cap on scores is passed over by SDPA of transformers 5.17, and so by the suite there.
        ("gemma2", {"gated activation", "cap on logits", "scale of scores"}),
    ],
)
def test_what_a_type_alone_has_changes_its_logits_and_so_is_judged(model_type: str, names: set[str]) -> None:
    judged = _Judged(replace(LLAMA, model_type=model_type), {})
    assert names <= {name.partition(" {")[0] for name, _ in judged.variants()}


def test_a_type_that_huggingface_does_not_know_is_not_acquitted() -> None:
    with pytest.raises(ConformanceError, match="transformers has no model of type 'nobodys'"):
        run_model_conformance(replace(LLAMA, model_type="nobodys"))


def test_wefts_own_is_acquitted_to_the_bit() -> None:
    assert not run_model_conformance(LLAMA, bitwise=True).not_judged
