"""Scheduling policies, found by name: each file here that defines `POLICY` is one. No torch."""

from importlib import import_module
from pkgutil import iter_modules

from weft.config import POLICY_OPTIONS, SchedulerConfig
from weft.errors import ConfigError, nearest
from weft.inference.policies.interface import Policy


def known_policies() -> dict[str, type[Policy]]:
    """Every policy of this folder, by the name of its file."""
    modules = {module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)}
    return {name: module.POLICY for name, module in modules.items() if hasattr(module, "POLICY")}


def find_policy(name: str) -> type[Policy]:
    """The policy of this name. Raises: ConfigError with the known names."""
    known = known_policies()
    if name not in known:
        raise ConfigError(f"unknown policy={name!r}", hint=nearest(name, known))
    return known[name]


def build_policy(config: SchedulerConfig) -> Policy:
    """The policy that the configuration names. Raises: ConfigError if it sets an option which that policy lacks."""
    kind = find_policy(config.policy)
    for name in POLICY_OPTIONS:
        if getattr(config, name) is not None and name not in kind.options:
            having = [policy for policy, other in known_policies().items() if name in other.options]
            raise ConfigError(
                f"{name}={getattr(config, name)!r} says nothing to policy={config.policy!r}",
                hint="it is an option of " + ", ".join(having),
            )
    return kind(config)
