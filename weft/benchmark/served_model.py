"""What a benchmark serves: a checkpoint or a bare shape, and the device and dtype it is served in."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.benchmark.readiness import release_memory
from weft.benchmark.row import Row
from weft.benchmark.shapes import ShapeCheckpoint, shape_config
from weft.config import EngineConfig, ModelConfig
from weft.errors import ConfigError
from weft.inference.placement import place
from weft.inference.startup import check
from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.load import read_config
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.oracle import Oracle


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """name: the alias, folder, hub id or shape, as asked for."""

    name: str
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    vocab_size: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def row(self, experiment: str, *, case: str, seed: int, notes: str) -> Row:
        """A row about this model, with no system and no number yet."""
        return Row(experiment=experiment, case=case, model=self.name, dtype=self.dtype_name, seed=seed, notes=notes)

    def engine_config(self, options: Mapping[str, Any]) -> EngineConfig:
        """Of an engine of weft's that serves it. options: fields by their flat names. Raises: ConfigError."""
        served: dict[str, Any] = {"model": self.name, "dtype": self.dtype_name, "device": str(self.device)}
        return EngineConfig.of(**(served | dict(options)))

    def check(self, config: EngineConfig, *, longest: int, at_once: int = 1) -> None:
        """Raise ConfigError, CheckpointError or one of their kinds for an engine that cannot be, or has no room for its
        longest request, of so many tokens with its answer, or for so many of them. Reads no weights.
        """
        geometry = check(config, self.checkpoint)
        room = config.model.max_model_len or read_config(self.checkpoint).max_model_len
        if longest > room:
            raise ConfigError(
                f"max_model_len={room} holds no request of {longest} tokens, its answer included",
                hint="leave max_model_len out, or ask for shorter requests",
            )
        needed = at_once * geometry.blocks_for(longest - 1)  # the last token is never read back
        if config.cache.num_blocks is not None and needed > geometry.num_blocks:
            raise ConfigError(
                f"num_blocks={geometry.num_blocks} of {geometry.block_size} tokens do not hold {at_once} requests "
                f"of up to {longest} tokens",
                hint=f"num_blocks={needed}, or leave it out",
            )

    def check_prompts(self, longest: int) -> None:
        """Raise ConfigError if no prompt of so many tokens can be answered, before any is drawn."""
        positions = read_config(self.checkpoint).max_model_len
        if longest >= positions:
            raise ConfigError(
                f"prompts of {longest} tokens leave no room for an answer in the {positions} positions of {self.name}",
                hint="shorter prompts",
            )

    def huggingface_model(self) -> Any:
        """A model of HuggingFace's own, loaded by its own code, that no end-of-sequence id stops."""
        from transformers import GenerationConfig

        if isinstance(self.checkpoint, ShapeCheckpoint):
            model = self.checkpoint.huggingface_model()
        else:
            model = Oracle(self.checkpoint.tokenizer, dtype=self.dtype, device=self.device).model
        # What a call leaves open, `generate` fills in from here: the authors' EOS and penalties among it.
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model


def open_shapes(names: str, *, dtype: str, device: str, seed: int) -> list[ServedModel]:
    """Each of the shapes between commas. Raises: ConfigError, CheckpointError and their kinds."""
    return [
        open_model(model=name, shape=name, dtype=dtype, device=device, seed=seed)
        for name in names.split(",")
        if shape_config(name)  # of an empty name `open_model` would say that a model has none
    ]


def by_shapes(
    models: Iterable[ServedModel],
    config_of: Callable[[ServedModel], EngineConfig],
    rows_of: Callable[[ServedModel, EngineConfig], Iterator[Row]],
) -> Iterator[Row]:
    """An engine after the other, each gone before the next. All configurations are made at once, and may raise."""
    engines = [(model, config_of(model)) for model in models]

    def rows() -> Iterator[Row]:
        for model, config in engines:
            yield from rows_of(model, config)
            release_memory()

    return rows()


def open_model(*, model: str, shape: str | None, dtype: str, device: str, seed: int) -> ServedModel:
    """The checkpoint `model`, or random weights of `shape` if one is given. Reads no weights.

    Raises: ConfigError, CheckpointError and their kinds.
    """
    config = ModelConfig(model=shape or model, dtype=dtype, device=device, seed=seed)
    if shape is None:
        checkpoint: Checkpoint = open_checkpoint(model)
        placement = place(config, checkpoint.stored_dtype)
    else:
        fields = shape_config(shape)
        placement = place(config, "bfloat16")
        checkpoint = ShapeCheckpoint(fields, dtype=placement.dtype, device=placement.device, seed=seed)
    return ServedModel(
        name=shape or model,
        checkpoint=checkpoint,
        dtype=placement.dtype,
        device=placement.device,
        vocab_size=read_config(checkpoint).vocab_size,
    )
