"""Options of an experiment: frozen dataclasses, whose fields the command line turns into `--arguments`."""

from dataclasses import dataclass, field
from typing import Any

from weft.config import DTYPE_ALIASES, DTYPES
from weft.errors import ConfigError
from weft.options import positive


def option(default: Any, meaning: str) -> Any:
    """A field of an options dataclass, with what `--help` says of it. Its type is that of the default (None: text)."""
    return field(default=default, metadata={"help": meaning})


def numbers(name: str, text: str) -> list[int]:
    """Positive integers between commas. Raises: ConfigError.

    >>> numbers("batch", "1,8,64")
    [1, 8, 64]
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is no list of numbers", hint="1,8,64") from error
    for value in values:
        positive("options", **{name: value})
    return values


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is served, and where. Checked where they are used: by the checkpoint, the shape and the placement."""

    model: str = option("smollm2-135m", "alias, folder, .gguf file or hub id")
    shape: str | None = option(None, "random weights of this shape in place of a model: llama-190m, llama-1b, llama-8b")
    dtype: str = option("float32", "one of " + ", ".join((*DTYPES, *DTYPE_ALIASES)))
    device: str = option("cpu", "auto, cpu, cuda or cuda:N")
    seed: int = option(0, "of the workload, and of random weights")
    repetitions: int = option(1, "measured runs; medians are reported")

    def __post_init__(self) -> None:
        positive(type(self).__name__, repetitions=self.repetitions)
