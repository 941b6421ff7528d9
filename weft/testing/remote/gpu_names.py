"""GPUs by the names that Modal knows. It takes any name while a program is built, and fails when that runs."""

from weft.errors import ConfigError, nearest

DEFAULT_GPU = "H100!"  # with the mark: no silent upgrade to another model, which would make a speed another's
_NAMES = (
    *("T4", "L4", "A10", "L40S", "A100", "A100-40GB", "A100-80GB", "RTX-PRO-6000"),
    *("H100", "H100!", "H200", "B200", "B200+"),
)
_MOST = 8  # of one host


def checked_gpu(name: str) -> str:
    """The name as Modal wants it: one GPU, or `name:count`. Raises: ConfigError for any other.

    >>> checked_gpu("h200"), checked_gpu("H100!:2")
    ('H200', 'H100!:2')
    """
    base, colon, count = name.partition(":")
    known = {known.upper(): known for known in _NAMES}
    if base.upper() not in known:
        hint = nearest(base.upper(), _NAMES)
        if "/" in base or "." in base:
            hint = f"a file after a bare --modal is read as its GPU; write --modal={DEFAULT_GPU}"
        raise ConfigError(f"--modal: no GPU is named {name!r}", hint=hint)
    if colon and not (count.isdecimal() and 1 <= int(count) <= _MOST):
        raise ConfigError(f"--modal={name}: {count!r} is no number of GPUs", hint=f"1 to {_MOST}, or none")
    return known[base.upper()] + colon + count
