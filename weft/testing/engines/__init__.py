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


def check_name(name: str) -> None:
    """Import nothing. Raises: ConfigError unless this is a name of `known_engines`, a file that is there, or dotted."""
    word, _ = _split(name)
    if word.endswith(".py"):
        if not Path(word).is_file():
            raise ConfigError(f"there is no engine file {word}")
    elif word not in known_engines() and ("." not in word or not all(part.isidentifier() for part in word.split("."))):
        hint = nearest(word, known_engines()) + "; an engine of your own is a file or a module: ./my_engine.py"
        raise ConfigError(f"unknown engine {name!r}", hint=hint)


def find_engine(name: str) -> "tuple[EngineFactory, str | None]":
    """The engine that `name` names, imported, and what follows its colon (`openai:URL`).

    Raises: ConfigError if there is no such engine, or what it runs is not installed.
    """
    check_name(name)
    word, argument = _split(name)
    if word.endswith(".py"):
        module = _from_file(Path(word))
    elif word in known_engines():
        module = import_module(f"{__name__}.{word.replace('-', '_')}")
    else:
        try:
            module = import_module(word)
        except ModuleNotFoundError as error:
            hint = (
                "it is looked for where Python looks; one in the working directory is named by its file, ./my_engine.py"
            )
            raise ConfigError(f"engine {name!r} cannot be imported: {error}", hint=hint) from error
    return _factory(module, name), argument


def open_engine(name: str, model: "ModelUnderTest") -> "EngineUnderTest":
    """That engine with the model loaded. Raises: ConfigError, and what the engine itself raises."""
    from weft.testing.engines.interface import checked

    factory, argument = find_engine(name)
    return checked(factory(model, argument))


def _split(name: str) -> tuple[str, str | None]:
    """What comes before the first colon, and what follows it; but a file may have a colon in its name."""
    if name.endswith(".py"):
        return name, None
    word, colon, argument = name.partition(":")
    return word, argument if colon else None


def _factory(module: ModuleType, name: str) -> "EngineFactory":
    if not hasattr(module, "ENGINE"):
        raise ConfigError(f"{name} defines no ENGINE", hint="docs/verify.md has an example")
    factory: EngineFactory = module.ENGINE
    return factory


def _from_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"weft_engine_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
