"""Laws of a model family: its config read and its logits computed as HuggingFace does, whatever the config says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.attention.contiguous import BACKEND
from weft.attention.interface import AttentionSpec
from weft.batch import Batch, GroupTables, SamplingRows
from weft.config import CacheConfig, Limits
from weft.errors import CheckpointError, TensorError, UnsupportedCheckpointError
from weft.layers.operations import PlainOperations
from weft.layers.weights import poison
from weft.models.family import Family, Model, ModelConfig
from weft.testing.conformance.suite import ConformanceReport, given, must, require, try_laws
from weft.testing.exactness import LOGIT_TOLERANCE
from weft.testing.finding import NotJudged

CPU = torch.device("cpu")
TOKENS = (5, 90, 3, 3, 17, 0, 64, 41, 7, 12)
_ROOM = 64
# No two alike, so that a mixed-up dimension shows; K and V are wide enough for packed projections to keep every bit.
_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": _ROOM,
}
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
# What configs of decoders say that changes numerics, away from the usual value. A family has those that its own config
# class at HuggingFace has; a value that changes none of HuggingFace's logits shows nothing and is passed over.
_VARIANTS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "epsilon": {"rms_norm_eps": 1e-2},
    "tied head": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True},
    "activation": {"hidden_act": "gelu"},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "yarn rope": {"rope_parameters": _YARN},
    "rope scaling": {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 32}},
    "window": {"sliding_window": 4},
    "windows above a layer": {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    "a window that is not used": {"sliding_window": 3, "use_sliding_window": False},
    "gated activation": {"hidden_activation": "relu"},
    "cap on scores": {"attn_logit_softcapping": 0.5},
    "cap on logits": {"final_logit_softcapping": 0.5},
    "scale of scores": {"query_pre_attn_scalar": 64},
    "multiplier of scores": {"attention_multiplier": 0.5},
    "multiplier of embeddings": {"embedding_multiplier": 2.0},
    "multiplier of residuals": {"residual_multiplier": 0.5},
    "scale of logits": {"logits_scaling": 2.0},
}


@dataclass(frozen=True)
class _Judged:
    family: Family
    config: dict[str, Any]

    def theirs(self, **fields: Any) -> Any:
        """HuggingFace's tiny model of this type, every parameter random. Raises: NotJudged if it knows no such type."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.for_model(self.family.model_type, **(_TINY | self.config | fields))
        except ValueError as unknown:
            raise NotJudged(f"transformers has no model of type {self.family.model_type!r}") from unknown
        model = AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
        return model

    @cached_property
    def plain(self) -> Any:
        return self.theirs()

    def variants(self) -> Iterator[tuple[str, Any]]:
        """Each with a name and HuggingFace's model; the first is plain."""
        yield "plain", self.plain
        known = self.plain.config.to_dict()
        usual = _their_logits(self.plain)
        for name, fields in _VARIANTS.items():
            if fields.keys() <= known.keys():
                model = self.theirs(**fields)
                if not torch.equal(_their_logits(model), usual):
                    yield f"{name} {fields}", model


def run_model_conformance(family: Family, *, bitwise: bool = False, **config: Any) -> ConformanceReport:
    """Judge a family, a `weft.models.family.Family`.

    bitwise: logits have to equal HuggingFace's to the bit, which weft's families do on x86; else within 1e-3, where
    noise is 1e-4.   config: fields of every tiny model's `config.json`, over those of the suite.
    Returns: every law with its outcome. Raises: ConformanceError, an AssertionError that names each broken law and the
    config that broke it.
    """
    require(family, isinstance(family, Family), "a weft.models.family.Family")
    tolerance = 0.0 if bitwise else LOGIT_TOLERANCE

    def logits_equal_huggingface_for_every_field_that_changes_them(judged: _Judged) -> str:
        return _equal(judged, tolerance)

    laws = (logits_equal_huggingface_for_every_field_that_changes_them, *LAWS)
    with torch.inference_mode():
        return try_laws("model family", family.model_type, _Judged(family, config), laws)


def logits_of(
    family: Family, theirs: Any, tokens: tuple[int, ...] = TOKENS, *, chunks: tuple[int, ...] = ()
) -> Float[Tensor, "T V"]:
    """The family's logits of these tokens, with the config and the weights of a HuggingFace model.

    chunks: where the sequence is cut; all at once if nowhere.
    Raises: CheckpointError and its kinds, as loading does.
    """
    module = family.build(family.read_config(theirs.config.to_dict()), _ROOM, torch.float32, CPU)
    poison(module)
    model = cast("Model", module)
    model.weight_slots().fill(iter(_tensors_of(theirs)))
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=_ROOM, max_model_len=_ROOM)
    geometry = BACKEND.geometry(limits, CacheConfig())
    cache = BACKEND.allocate(model.attention_specs, geometry, torch.float32, CPU)
    rows, start = [], 0
    for end in (*chunks, len(tokens)):
        batch = _batch_of(tokens, start, end)
        ops = PlainOperations(cache.prepare(batch))
        rows.append(model.logits(model.forward(batch.token_ids, batch.positions, ops), batch.logit_rows, ops))
        start = end
    return torch.cat(rows)


def config_and_model_have_what_the_engine_reads(judged: _Judged) -> str:
    config = judged.family.read_config(judged.plain.config.to_dict())
    module = judged.family.build(config, 8, torch.float32, CPU)
    assert isinstance(module, nn.Module), f"build makes a {type(module).__name__}, no module"
    for protocol, made in ((ModelConfig, config), (Model, module)):
        lacking = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(made, name)]
        assert not lacking, f"{type(made).__name__} has no {', '.join(lacking)}"
    for name, expected in (("vocab_size", _TINY["vocab_size"]), ("max_model_len", _ROOM)):
        found = getattr(config, name)
        assert found == expected, f"given max_position_embeddings {_ROOM}: {name} is {found}, not {expected}"
    specs = cast("Model", module).attention_specs
    layers = judged.plain.config.num_hidden_layers
    assert len(specs) == layers, f"given {layers} layers: {len(specs)} attention specs"
    assert all(isinstance(spec, AttentionSpec) for spec in specs), f"{specs} are no attention specs"
    return f"{len(specs)} layers"


def every_tensor_of_a_checkpoint_has_its_place(judged: _Judged) -> str:
    """vllm#53019, vllm#3767: what is missing or left over is an error, and no parameter stays as it was made."""
    tensors = _tensors_of(judged.plain)
    model = judged.family.build(judged.family.read_config(judged.plain.config.to_dict()), 8, torch.float32, CPU)
    poison(model)
    slots = cast("Model", model).weight_slots()
    with given("the tensors of HuggingFace's plain model"):
        slots.fill(iter(tensors))
        unset = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
        assert not unset, f"no tensor sets {', '.join(unset)}"
    for place, (name, _) in enumerate(tensors):
        rest = tensors[:place] + tensors[place + 1 :]
        must(TensorError, lambda rest=rest: slots.fill(iter(rest)), f"given no {name!r}: it is loaded")  # type: ignore[misc]
    more = [*tensors, ("model.layers.0.self_attn.q_proj.unknown", torch.zeros(3))]
    must(TensorError, lambda: slots.fill(iter(more)), "given a tensor that no parameter takes: it is loaded")
    return f"{len(tensors)} tensors, each of which is missed"


def a_missing_field_is_an_error_that_names_it(judged: _Judged) -> str:
    config = judged.plain.config.to_dict()
    for field in _NEEDED:
        rest = {name: value for name, value in config.items() if name != field}
        message = ""
        try:
            judged.family.read_config(rest)
        except CheckpointError as error:
            message = str(error)
        assert message, f"given no {field!r}: a config is read"
        assert field in message, f"given no {field!r}: the error does not name it: {message}"
    return ", ".join(_NEEDED)


def chunks_never_change_logits(judged: _Judged) -> str:
    """Positions, not places in a step, say where a token stands (unsloth#3699)."""
    worst = 0.0
    for name, model in judged.variants():
        for chunks in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (4, 9)):
            with given(f"{name}, chunks that end at {chunks}"):
                try:
                    whole, cut = logits_of(judged.family, model), logits_of(judged.family, model, chunks=chunks)
                except UnsupportedCheckpointError:
                    continue
                worst = max(worst, _gap(whole, cut, LOGIT_TOLERANCE))
    return f"off by {worst:.1e} at most, {LOGIT_TOLERANCE:g} is allowed"


LAWS: tuple[Callable[[_Judged], str], ...] = (
    config_and_model_have_what_the_engine_reads,
    every_tensor_of_a_checkpoint_has_its_place,
    a_missing_field_is_an_error_that_names_it,
    chunks_never_change_logits,
)


def _equal(judged: _Judged, tolerance: float) -> str:
    worst, names, refused = 0.0, [], []
    for name, model in judged.variants():
        try:
            with given(f"the config {name}"):
                try:
                    found = logits_of(judged.family, model)
                except UnsupportedCheckpointError as error:
                    refused.append(f"{name}: {error.message}")
                    continue
                worst = max(worst, _gap(_their_logits(model), found, tolerance))
        finally:
            names.append(name)
    if len(refused) == len(names):
        raise NotJudged("; ".join(refused))
    words = f"{len(names) - len(refused)} configs, off by {worst:.1e} at most, {tolerance:g} is allowed"
    return words + (f"; refused, so not judged: {'; '.join(refused)}" if refused else "")


def _gap(expected: Tensor, found: Tensor, tolerance: float) -> float:
    assert found.shape == expected.shape, f"logits are {tuple(found.shape)}, not {tuple(expected.shape)}"
    gaps = (found - expected).abs().nan_to_num(torch.inf).amax(-1)
    largest, place = float(gaps.max()), int((gaps > tolerance).int().argmax())
    assert largest <= tolerance, (
        f"off by {largest:.3g}, {tolerance:g} is allowed, first at token {place} of {len(gaps)}"
    )
    return largest


def _their_logits(model: Any) -> Tensor:
    return cast("Tensor", model(torch.tensor([TOKENS])).logits[0])


def _tensors_of(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def _batch_of(tokens: tuple[int, ...], start: int, end: int) -> Batch:
    positions, nothing = torch.arange(start, end), torch.empty(0, dtype=torch.int64)
    return Batch(
        token_ids=torch.tensor(tokens[start:end]),
        positions=positions,
        sequence_lengths=torch.tensor([end]),
        query_starts=torch.tensor([0, end - start]),
        groups=(GroupTables(block_tables=torch.zeros(1, 1, dtype=torch.int64), slot_mapping=positions),),
        logit_rows=torch.arange(end - start),
        sampling=SamplingRows(temperatures=torch.empty(0), seeds=nothing, positions=nothing, any_noise=False),
    )
