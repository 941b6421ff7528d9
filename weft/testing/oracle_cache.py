"""Results of the reference on disk, so that suites pay for them once. Knows no model.

An entry is found under everything that its result depends on, and only if its bytes are those that were written: one
that is cut short, changed or renamed is computed again.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from weft.errors import ConfigError

_LOGGER = logging.getLogger(__name__)
_DIGEST_BYTES = hashlib.sha256().digest_size
_READ_BY_HUGGINGFACE = {".json", ".safetensors", ".bin"}


class OracleCache:
    """A folder of results. Several processes may share it: each entry appears whole or not at all.

    num_hits, num_misses: results found and results computed, by this object.
    """

    def __init__(self, folder: Path | str) -> None:
        """Raises: ConfigError if the folder cannot be made or written."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the oracle's cache {folder} cannot be used: {error}") from error
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"the oracle's cache {folder} cannot be written")
        self.folder = folder
        self.num_hits = 0
        self.num_misses = 0

    def fetch(self, key: Mapping[str, object], compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The result under `key`, computed if there is no sound entry. `key`: plain values, all that it depends on.

        One that cannot be kept is given all the same, with a warning: it may have taken minutes.
        """
        name = json.dumps(key, sort_keys=True).encode()
        path = self.folder / hashlib.sha256(name).hexdigest()
        found = _read(path, name)
        if found is not None:
            self.num_hits += 1
            return found
        self.num_misses += 1
        result = compute()
        try:
            _write(path, name, result)
        except OSError as error:
            _LOGGER.warning("the oracle's cache %s does not keep a result: %s", self.folder, error)
        return result


def weights_digest(folder: Path, gguf_file: str | None) -> str:
    """SHA-256 of all that HuggingFace reads of a checkpoint: names and contents, not times or places."""
    names = [path.name for path in folder.iterdir() if path.suffix in _READ_BY_HUGGINGFACE]
    if gguf_file is not None:
        names = [name for name in names if name.endswith(".json")] + [gguf_file]
    total = hashlib.sha256()
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            total.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
    return total.hexdigest()


def _read(path: Path, name: bytes) -> dict[str, Tensor] | None:
    try:
        content = path.read_bytes()
    except OSError:  # not there, or nothing that can be read
        return None
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return safetensors.torch.load(payload) if digest == _digest(name, payload) else None


def _write(path: Path, name: bytes, tensors: dict[str, Tensor]) -> None:
    payload = safetensors.torch.save({field: tensor.contiguous() for field, tensor in tensors.items()})
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(_digest(name, payload) + payload)
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


def _digest(name: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(name + payload).digest()
