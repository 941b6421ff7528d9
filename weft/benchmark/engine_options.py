"""Fields of `EngineConfig` as one argument: `enforce_eager=true,graph_batch_sizes=1:8:64`. Their owner checks them."""

from typing import Any

from weft.config import EngineConfig
from weft.errors import ConfigError

_OWN = ("model", "dtype", "device", "seed")  # what a row says of a run comes from the experiment's own options
_WORDS = {"true": True, "false": False, "none": None}


def parse_engine_options(text: str | None) -> dict[str, Any]:
    """Names and values; a value with colons is a tuple.

    Raises: ConfigError for what is no `name=value`, and what `EngineConfig` raises for a name or value of its own.

    >>> parse_engine_options("overlap=false,max_num_seqs=8,graph_batch_sizes=1:8,policy=fcfs")
    {'overlap': False, 'max_num_seqs': 8, 'graph_batch_sizes': (1, 8), 'policy': 'fcfs'}
    """
    options: dict[str, Any] = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"engine={text!r}: {part!r} is no name=value", hint="enforce_eager=true,overlap=false")
        if name in _OWN:
            raise ConfigError(f"engine={text!r}: {name} is not the engine's alone", hint=f"--{name}, or --shape")
        if name in options:
            raise ConfigError(f"engine={text!r} gives {name} twice")
        options[name] = tuple(map(_value, value.split(":"))) if ":" in value else _value(value)
    sizes = options.get("graph_batch_sizes")
    batches = [size for size in sizes if isinstance(size, int) and size > 0] if isinstance(sizes, tuple) else []
    EngineConfig.of(**{"model": "any", "max_num_seqs": max(batches, default=1)} | options)
    return options


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
