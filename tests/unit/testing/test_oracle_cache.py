"""What the reference said is found again under the same conditions, and never under others."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from weft.errors import ConfigError
from weft.models.checkpoint.interface import TokenizerLocation
from weft.testing.continuation import Continuation
from weft.testing.oracle import Oracle
from weft.testing.oracle_cache import OracleCache, weights_digest
from weft.testing.tiny import save_tiny_model

PROMPT = (5, 9, 40)
LENGTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", eos_token_id=9, num_hidden_layers=1)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def oracle(folder: Path, kept: Path | None, dtype: torch.dtype = torch.float32) -> Oracle:
    return Oracle(TokenizerLocation(folder=folder), dtype=dtype, device=torch.device("cpu"), cache_folder=kept)


def counts(of: Oracle) -> tuple[int, int]:
    assert of.cache is not None
    return of.cache.num_hits, of.cache.num_misses


def same(left: Continuation, right: Continuation) -> bool:
    ends = replace(left, logits=right.logits) == right
    return ends and torch.equal(left.logits, right.logits)


def test_a_second_run_finds_every_result_and_loads_no_model(folder: Path, kept: Path) -> None:
    plain, first = oracle(folder, None), oracle(folder, kept)
    said = plain.generate(PROMPT, LENGTH)
    assert plain.cache is None
    assert same(first.generate(PROMPT, LENGTH), said)
    scored = first.score(PROMPT, said.token_ids)
    second = oracle(folder, kept)
    assert same(second.generate(PROMPT, LENGTH), said)
    assert torch.equal(second.score(PROMPT, said.token_ids), scored)
    assert (counts(first), counts(second)) == ((0, 2), (2, 0))
    assert "model" not in vars(second)


def test_another_prompt_length_stop_seed_or_dtype_is_another_result(folder: Path, kept: Path) -> None:
    first = oracle(folder, kept)
    said = first.generate(PROMPT, LENGTH)
    first.generate(PROMPT[:-1], LENGTH)
    first.generate(PROMPT, LENGTH - 1)
    stopped = first.generate(PROMPT, LENGTH, stop_token_ids=said.token_ids[:1])
    assert (stopped.token_ids, stopped.finish_reason) == (said.token_ids[:1], "stop")
    first.generate(PROMPT, LENGTH, seed=1)
    first.generate(PROMPT, LENGTH, seed=2)
    first.score(PROMPT, said.token_ids)
    first.score(PROMPT, said.token_ids[:-1])
    narrow = oracle(folder, kept, torch.bfloat16)
    narrow.generate(PROMPT, LENGTH)
    assert (counts(first), counts(narrow)) == ((0, 8), (0, 1))


@pytest.mark.parametrize("version", ["torch", "transformers"])
def test_other_versions_are_computed_anew(
    folder: Path, kept: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle(folder, kept).generate(PROMPT, LENGTH)
    monkeypatch.setattr(f"{version}.__version__", f"{import_module(version).__version__.split('+')[0]}+other")
    later = oracle(folder, kept)
    later.generate(PROMPT, LENGTH)
    assert counts(later) == (0, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("get_num_threads", 31), ("get_float32_matmul_precision", "medium")],
)
def test_what_moves_the_last_bits_of_a_sum_is_part_of_the_key(
    folder: Path, kept: Path, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle(folder, kept).generate(PROMPT, LENGTH)
    monkeypatch.setattr(torch, name, lambda: value)
    later = oracle(folder, kept)
    later.generate(PROMPT, LENGTH)
    assert counts(later) == (0, 1)


def test_other_weights_in_the_same_place_are_computed_anew(tmp_path: Path, kept: Path) -> None:
    said = []
    for seed in (0, 1):
        save_tiny_model(tmp_path / "model", "llama", seed=seed, num_hidden_layers=1)
        said.append(oracle(tmp_path / "model", kept).generate(PROMPT, LENGTH))
    assert not torch.equal(said[0].logits, said[1].logits)


@pytest.mark.parametrize("fault", ["one bit", "cut short", "empty", "of another"])
def test_an_entry_that_is_not_what_was_written_is_computed_again(folder: Path, kept: Path, fault: str) -> None:
    first = oracle(folder, kept)
    said = first.generate(PROMPT, LENGTH)
    (entry,) = kept.iterdir()
    sound = entry.read_bytes()
    first.generate(PROMPT, LENGTH - 1)
    (other,) = {*kept.iterdir()} - {entry}
    flipped = bytes([*sound[:-9], sound[-9] ^ 1, *sound[-8:]])
    entry.write_bytes(
        {"one bit": flipped, "cut short": sound[:-9], "empty": b"", "of another": other.read_bytes()}[fault]
    )
    second = oracle(folder, kept)
    assert same(second.generate(PROMPT, LENGTH), said)
    assert counts(second) == (0, 1)
    assert entry.read_bytes() == sound


def test_an_entry_appears_whole_or_not_at_all(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = OracleCache(kept)

    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.fetch({"call": "x"}, lambda: {"logits": torch.ones(2)})
    assert cache.fetch({"call": "x"}, lambda: {"logits": torch.zeros(2)})["logits"].tolist() == [0, 0]
    assert cache.num_misses == 2


def test_the_digest_is_of_contents_and_of_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"weights")
    (tmp_path / "model.safetensors").write_bytes(b"tensors")
    of_gguf, of_folder = weights_digest(tmp_path, "model.gguf"), weights_digest(tmp_path, None)
    (tmp_path / "README.md").write_text("nothing")
    assert (weights_digest(tmp_path, "model.gguf"), weights_digest(tmp_path, None)) == (of_gguf, of_folder)
    (tmp_path / "model.gguf").write_bytes(b"weightz")
    assert weights_digest(tmp_path, "model.gguf") != of_gguf
    assert weights_digest(tmp_path, None) == of_folder
    (tmp_path / "config.json").write_text("{ }")
    of_other = weights_digest(tmp_path, None)
    assert of_other != of_folder
    for name in ("modem.safetensors", "adapter.safetensors"):  # the first where it was in the order of names
        next(tmp_path.glob("*.safetensors")).rename(tmp_path / name)
        assert weights_digest(tmp_path, None) not in (of_other, of_folder), "HuggingFace reads by name"
    (tmp_path / "pytorch_model.bin").write_bytes(b"tensors")
    of_pickle = weights_digest(tmp_path, None)
    (tmp_path / "pytorch_model.bin").write_bytes(b"tensorz")
    assert weights_digest(tmp_path, None) != of_pickle


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        OracleCache(tmp_path / "file")


@pytest.mark.parametrize("obstacle", ["a folder", "nobody may read it", "no room"])
def test_a_result_that_cannot_be_kept_is_given_all_the_same_and_leaves_nothing(
    kept: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = OracleCache(str(kept))
    cache.fetch({"call": 1}, lambda: {"logits": torch.zeros(3)})
    (entry,) = kept.iterdir()
    if obstacle == "a folder":
        entry.unlink()
        entry.mkdir()
    elif obstacle == "nobody may read it":  # root may
        monkeypatch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(PermissionError(13, "denied")))
    else:
        entry.unlink()
        monkeypatch.setattr(Path, "replace", lambda path, target: (_ for _ in ()).throw(OSError(28, "no space left")))
    found = cache.fetch({"call": 1}, lambda: {"logits": torch.ones(3)})
    assert torch.equal(found["logits"], torch.ones(3))
    assert (cache.num_hits, cache.num_misses) == (0, 2)
    assert ("does not keep a result" in caplog.text) == (obstacle != "nobody may read it")
    assert not [path for path in kept.iterdir() if path.name.startswith(".")]


def test_a_write_that_is_interrupted_leaves_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    cache = OracleCache(kept)
    with pytest.raises(KeyboardInterrupt):
        cache.fetch({"call": 1}, lambda: {"logits": torch.zeros(3)})
    assert not [*kept.iterdir()]
