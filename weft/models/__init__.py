"""Model families: each file here that defines `FAMILY` is one, found by the `model_type` of a checkpoint."""

from importlib import import_module
from pkgutil import iter_modules

from weft.errors import UnknownModelTypeError, nearest
from weft.models.family import Family


def known_families() -> dict[str, Family]:
    """Every family of this folder, by `model_type`."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    families = (module.FAMILY for module in modules if hasattr(module, "FAMILY"))
    return {family.model_type: family for family in families}


def find_family(model_type: object) -> Family:
    """The family of this `model_type`. Raises: UnknownModelTypeError with the known ones."""
    known = known_families()
    if not isinstance(model_type, str) or model_type not in known:
        raise UnknownModelTypeError(
            f"unknown model_type={model_type!r}",
            hint=nearest(str(model_type), known) + f" (known families: {', '.join(sorted(known))})",
        )
    return known[model_type]
