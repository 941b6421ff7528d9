"""A folder in HuggingFace's layout: `config.json` and `model.safetensors`, or shards named by their index."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedCheckpointError
from weft.models.checkpoint.interface import GenerationDefaults, TokenizerLocation

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """Reads only the files that the index names, or `model.safetensors` where there is no index."""

    def __init__(self, folder: Path, *, weights: bool = True) -> None:
        """`weights=False` opens the config alone (for dummy weights).

        Raises: CheckpointNotFoundError, CorruptCheckpointError, UnsupportedCheckpointError (quantised).
        """
        config = _read_json(folder / "config.json")
        if config is None:
            raise CheckpointNotFoundError(f"{folder} has no config.json")
        self.config = config
        _refuse_quantised(self.config)
        self.generation = GenerationDefaults.of(self.config, _read_json(folder / "generation_config.json"))
        self.stored_dtype: str | None = self.config.get("dtype") or self.config.get("torch_dtype")
        self.tokenizer = TokenizerLocation(folder=folder)
        self._files = _weight_files(folder) if weights else []
        self.num_tensors = sum(len(_names(file)) for file in self._files)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file in self._files:
            for name in _names(file):
                yield name, _read(file, name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        weight_map = (_read_json(index) or {}).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptCheckpointError(f"{index} has no 'weight_map'")
        for name in weight_map.values():
            if not isinstance(name, str) or not name or Path(name).name != name:
                raise CorruptCheckpointError(f"{index}: {name!r} in 'weight_map' is no file of its folder")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointNotFoundError(f"{index} names {file.name}, which is not in the folder")
        return files
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise CheckpointNotFoundError(
        f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX} (found: {found})",
        hint="weft reads safetensors and GGUF; convert pickled .bin weights with HuggingFace's save_pretrained",
    )


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def _read(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpointError(f"{file}: cannot read tensor {name!r}: {error}") from error


def _read_json(path: Path) -> Mapping[str, Any] | None:
    """The object in a JSON file, or None if there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also bytes that are no text, and a number of thousands of digits
        raise CorruptCheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    scheme = config.get("quantization_config") or config.get("compression_config")
    if scheme:
        name = scheme.get("quant_method", "unnamed") if isinstance(scheme, Mapping) else scheme
        raise UnsupportedCheckpointError(
            f"the checkpoint is quantised with {name!r}, which weft cannot run",
            hint="load the unquantised checkpoint, or a GGUF, which is dequantised on loading",
        )
