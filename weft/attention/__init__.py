"""Attention backends, found by name: a file here that defines `BACKEND` is one."""

from importlib import import_module
from pkgutil import iter_modules

import torch

from weft.attention.interface import AttentionBackend
from weft.errors import ConfigError, nearest

# What `auto` tries, in order: kernels where there is a GPU, blocks that can be shared, before rows that cannot. Without
# a GPU the kernels run in Triton's interpreter at best, which is for tests that ask for them by name.
PREFERRED = (*(("paged_triton",) if torch.cuda.is_available() else ()), "paged_gather", "contiguous")


def known_backends() -> dict[str, AttentionBackend]:
    """Every backend of this folder, by name."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    backends = (module.BACKEND for module in modules if hasattr(module, "BACKEND"))
    return {backend.name: backend for backend in backends}


def find_backend(name: str) -> AttentionBackend:
    """The backend of this name. Raises: ConfigError with the known names."""
    known = known_backends()
    if name not in known:
        raise ConfigError(f"unknown attention_backend={name!r}", hint=nearest(name, known))
    return known[name]
