"""Which of this run's options the pytest elsewhere is given: those that change what a test does or how it is shown.

Files, selections (-k, --lf), reports to files and -x stay here: what runs is sent by node id, and who reads the reports
stops when it has seen enough.
"""

from pathlib import Path

import pytest

_FLAGS = {"showlocals": "--showlocals", "update_snapshots": "--snapshot-update"}
_VALUES = {
    "verbose": "--verbosity",
    "tbstyle": "--tb",
    "importmode": "--import-mode",
    "markexpr": "-m",  # selects nothing there, but a conftest may look at it
    "engine_model": "--engine-model",
    "engine_dtype": "--engine-dtype",
}
_LISTS = {"plugins": "-p", "pythonwarnings": "-W", "override_ini": "-o", "engine": "--engine"}


def arguments_for(config: pytest.Config) -> tuple[str, ...]:
    """Options of the run elsewhere, whose working directory is the root of the tree."""
    arguments = ["--rootdir=.", "--require-gpu", "--color=no"]
    if config.inipath is not None and config.inipath.is_relative_to(config.rootpath):
        arguments += ["-c", Path(config.inipath).relative_to(config.rootpath).as_posix()]
    for name, option in _FLAGS.items():
        if getattr(config.option, name, False):
            arguments.append(option)
    for name, option in _VALUES.items():
        value = getattr(config.option, name, None)
        if value not in (None, ""):
            arguments += [option, str(value)] if option == "-m" else [f"{option}={value}"]
    for name, option in _LISTS.items():
        for value in getattr(config.option, name, None) or ():
            arguments += [option, str(value)]
    return tuple(arguments)
