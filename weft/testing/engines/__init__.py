"""Engines that the harness can judge, found by name: each file here that defines `ENGINE` is one.

    weft    hf    hf-cb    vllm    openai:URL

An engine of one's own needs no place here: a file (`./my_engine.py`) or a module (`my_package.my_engine`) that defines
`ENGINE` is named instead. `docs/verify.md` says how to write one.
"""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

from weft.errors import ConfigError, nearest

if TYPE_CHECKING:  # it loads torch, and who only asks for names should not wait for that
    from weft.testing.engines.interface import EngineFactory, EngineUnderTest, ModelUnderTest

_NO_ENGINES = {"interface"}


def known_engines() -> list[str]:
    """The names of the files of this folder, none of them imported."""
    return sorted(module.name.replace("_", "-") for module in iter_modules(__path__) if module.name not in _NO_ENGINES)


def find_engine(name: str) -> "tuple[EngineFactory, str | None]":
    """The engine that `name` names, imported, and what follows its colon (`openai:URL`).

    Raises: ConfigError if there is no such engine, or what it runs is not installed.
    """
    if name.endswith(".py"):
        return _factory(_from_file(Path(name)), name), None
    word, colon, argument = name.partition(":")
    if word in known_engines():
        module = import_module(f"{__name__}.{word.replace('-', '_')}")
    elif "." in word:
        try:
            module = import_module(word)
        except ModuleNotFoundError as error:
            raise ConfigError(f"engine {name!r} cannot be imported: {error}") from error
    else:
        hint = nearest(word, known_engines()) + "; an engine of your own is a file or a module: ./my_engine.py"
        raise ConfigError(f"unknown engine {name!r}", hint=hint)
    return _factory(module, name), argument if colon else None


def open_engine(name: str, model: "ModelUnderTest") -> "EngineUnderTest":
    """That engine with the model loaded. Raises: ConfigError, and what the engine itself raises."""
    from weft.testing.engines.interface import checked

    factory, argument = find_engine(name)
    return checked(factory(model, argument))


def _factory(module: ModuleType, name: str) -> "EngineFactory":
    if not hasattr(module, "ENGINE"):
        raise ConfigError(f"{name} defines no ENGINE", hint="docs/verify.md has an example")
    factory: EngineFactory = module.ENGINE
    return factory


def _from_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"weft_engine_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"there is no engine file {path}")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
