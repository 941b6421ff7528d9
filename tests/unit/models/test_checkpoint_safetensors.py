"""A folder in HuggingFace's layout is read whole, from the files its index names, or refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from weft.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    TensorError,
    UnsupportedCheckpointError,
)
from weft.layers.weights import WeightSlots
from weft.models.checkpoint.interface import Checkpoint, GenerationDefaults
from weft.models.checkpoint.load import load_model
from weft.models.checkpoint.safetensors import INDEX, WEIGHTS, SafetensorsCheckpoint
from weft.models.llama import Llama

Build = Callable[..., PreTrainedModel]
Logits = Callable[[Checkpoint], Tensor]

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(folder: Path) -> Any:
    checkpoint = SafetensorsCheckpoint(folder)
    return load_model(checkpoint, max_positions=64, dtype=torch.float32, device=torch.device("cpu"))


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Change tensors of the one weights file; None drops one."""
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def set_json(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | fields))


@pytest.fixture
def sharded(llama: PreTrainedModel, tmp_path: Path) -> Path:
    llama.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_every_tensor_is_given_once_under_its_name(llama: PreTrainedModel, folder: Path) -> None:
    checkpoint, state = SafetensorsCheckpoint(folder), llama.state_dict()
    tensors = list(checkpoint.tensors())
    assert sorted(name for name, _ in tensors) == sorted(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in tensors)
    assert checkpoint.num_tensors == len(state)
    assert checkpoint.stored_dtype == "float32"
    assert isinstance(checkpoint, Checkpoint)


def test_shards_give_what_one_file_gives(llama: PreTrainedModel, sharded: Path) -> None:
    tensors = dict(SafetensorsCheckpoint(sharded).tensors())
    assert tensors.keys() == llama.state_dict().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in llama.state_dict().items())


@pytest.mark.parametrize("stray", ["consolidated.safetensors", "model-00000-of-00009.safetensors", WEIGHTS])
def test_a_file_that_the_index_does_not_name_is_never_read(
    stray: str, sharded: Path, logits_of: Logits, llama: PreTrainedModel, tokens: list[int]
) -> None:
    save_file({name: torch.zeros_like(tensor) for name, tensor in llama.state_dict().items()}, sharded / stray)
    logits = logits_of(SafetensorsCheckpoint(sharded))
    assert torch.equal(logits, llama(torch.tensor([tokens])).logits[0])


def test_a_missing_shard_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointNotFoundError, match=f"names {gone.name}, which is not in the folder"):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, {"a": ""}], ids=str)
def test_an_index_that_names_no_files_is_corrupt(weight_map: object, sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptCheckpointError, match="weight_map"):
        SafetensorsCheckpoint(sharded)


def test_an_index_may_not_point_out_of_its_folder(sharded: Path) -> None:
    (sharded.parent / "other.safetensors").write_bytes(next(sharded.glob("*.safetensors")).read_bytes())
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(
        CorruptCheckpointError, match=r"'../other.safetensors' in 'weight_map' is no file of its folder"
    ):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize("part", [0.0, 0.00001, 0.001, 0.01, 0.5, 0.9999])
def test_a_truncated_file_is_corrupt(part: float, folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(CorruptCheckpointError, match=WEIGHTS):
        load(folder)


def test_a_file_of_another_kind_is_corrupt(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    with pytest.raises(CorruptCheckpointError, match=WEIGHTS):
        load(folder)


@pytest.mark.parametrize("other", [None, "pytorch_model.bin"])
def test_a_folder_without_safetensors_says_what_it_found(other: str | None, folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    if other is not None:
        (folder / other).write_bytes(b"pickle")
    with pytest.raises(CheckpointNotFoundError, match=f"holds no weights.*{other or 'config.json'}.*\nhint: .*convert"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"llama"', "\udcff", f'{{"a": {"9" * 5000}}}', "[" * 200_000],
    ids=["empty", "open", "a list", "null", "a string", "no text", "a number of 5000 digits", "ever deeper"],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_malformed_json_is_corrupt_by_file_name(file: str, text: str, folder: Path) -> None:
    (folder / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptCheckpointError, match=file):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_quantised_checkpoint_is_refused_by_scheme(field: str, folder: Path) -> None:
    set_json(folder / "config.json", **{field: {"quant_method": "awq", "bits": 4}})
    with pytest.raises(UnsupportedCheckpointError, match="quantised with 'awq'"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_tensors_under_a_plain_config_are_refused(dtype: torch.dtype, folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, **{name: load_file(folder / WEIGHTS)[name].to(dtype)})
    with pytest.raises(UnsupportedCheckpointError, match=f"'{name}' holds {dtype}"):
        load(folder)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_a_head_is_what_config_and_file_agree_on(
    head: str, tied: bool, folder: Path, logits_of: Logits, llama: PreTrainedModel, tokens: list[int]
) -> None:
    set_json(folder / "config.json", tie_word_embeddings=tied)
    embedding = load_file(folder / WEIGHTS)[EMBEDDING]
    given = {"absent": None, "equal": embedding, "different": embedding + 1}[head]
    rewrite(folder, **{HEAD: given})
    if (tied, head) == (False, "absent"):
        with pytest.raises(TensorError, match=f"lacks '{HEAD}'"):
            load(folder)
        return
    if (tied, head) == (True, "different"):
        with pytest.raises(TensorError, match=f"'{HEAD}' differs from '{EMBEDDING}'"):
            load(folder)
        return
    hidden = llama.model(torch.tensor([tokens])).last_hidden_state[0]
    expected = torch.nn.functional.linear(hidden, embedding if given is None else given)
    torch.testing.assert_close(logits_of(SafetensorsCheckpoint(folder)), expected)


@pytest.mark.parametrize("bias", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_bias_that_the_config_leaves_out_is_refused(bias: str, folder: Path) -> None:
    rewrite(folder, **{f"model.layers.1.{bias}.bias": torch.ones(64)})
    with pytest.raises(TensorError, match=f"model.layers.1.{bias}.bias.*no parameter takes it"):
        load(folder)


@pytest.mark.parametrize(("flag", "first"), [("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.gate_proj")])
def test_a_bias_that_the_file_leaves_out_is_refused(flag: str, first: str, folder: Path) -> None:
    set_json(folder / "config.json", **{flag: True})
    with pytest.raises(TensorError, match=f"lacks 'model.layers.0.{first}.bias'"):
        load(folder)


def test_rotary_buffers_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(folder)


def test_parameters_are_poisoned_until_they_are_filled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    poisoned, weight_slots = [], Llama.weight_slots

    def spy(model: Llama) -> WeightSlots:
        poisoned.append(all(parameter.isnan().all() for parameter in model.parameters()))
        return weight_slots(model)

    monkeypatch.setattr(Llama, "weight_slots", spy)
    assert all(parameter.isfinite().all() for parameter in load(folder).parameters())
    assert poisoned == [True]


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 7]}, None, (2, 7)),
        ({"eos_token_id": None}, None, ()),
        ({}, None, ()),
        ({"eos_token_id": 2}, {}, ()),
        ({"eos_token_id": 1}, {"eos_token_id": [1, 5]}, (1, 5)),
        ({"eos_token_id": [1, 5]}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 1}, {"eos_token_id": None}, ()),
        ({}, {"eos_token_id": 5}, (5,)),
    ],
)
def test_every_id_that_ends_a_sequence_is_read(
    config: dict[str, Any], generation: dict[str, Any] | None, ids: tuple[int, ...]
) -> None:
    assert GenerationDefaults.of(config, generation).eos_token_ids == ids


@pytest.mark.parametrize("eos", ["2", [1, "2"], True, 1.0, {"id": 2}], ids=repr)
def test_an_eos_that_is_no_token_id_is_refused(eos: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id must be"):
        GenerationDefaults.of({"eos_token_id": eos}, None)


def test_generation_defaults_come_from_the_folder(folder: Path) -> None:
    set_json(folder / "generation_config.json", eos_token_id=[1, 5], temperature=0.6)
    defaults = SafetensorsCheckpoint(folder).generation
    assert defaults.eos_token_ids == (1, 5)
    assert defaults.options["temperature"] == 0.6
    (folder / "generation_config.json").unlink()
    assert SafetensorsCheckpoint(folder).generation.eos_token_ids == (2,)
