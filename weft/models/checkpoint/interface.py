"""What a checkpoint gives, whatever its format: a config under HuggingFace's names, generation defaults, tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from weft.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """`generation_config.json`: every id that ends a sequence, and the sampling fields as the authors set them."""

    eos_token_ids: tuple[int, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> "GenerationDefaults":
        """The generation config's EOS ids; the model config's only where there is no generation config at all.

        So does HuggingFace: a generation config that names no EOS lets every sequence run to its length.

        >>> GenerationDefaults.of({"eos_token_id": 1}, {"eos_token_id": [1, 5]}).eos_token_ids
        (1, 5)
        """
        eos = (config if generation is None else generation).get("eos_token_id")
        ids = [] if eos is None else [eos] if isinstance(eos, int) else eos
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise CheckpointError(f"eos_token_id must be an integer or a list of integers, got {eos!r}")
        return cls(eos_token_ids=tuple(ids), options=generation or {})


@dataclass(frozen=True, kw_only=True)
class TokenizerLocation:
    """Where the tokenizer's files are; `gguf_file` names the GGUF that carries it, if one does."""

    folder: Path
    gguf_file: str | None = None


@runtime_checkable
class Checkpoint(Protocol):
    """One model on disk. Opening reads metadata only; `tensors` reads the weights, each once.

    stored_dtype: dtype name of the weights, or None if they are quantised and come out as float32.
    """

    config: Mapping[str, Any]
    generation: GenerationDefaults
    stored_dtype: str | None
    tokenizer: TokenizerLocation
    num_tensors: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor under HuggingFace's name."""
        ...
