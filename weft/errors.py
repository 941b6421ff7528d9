"""Every error that weft raises on purpose. Knows no other module of weft.

    WeftError
    ├── ConfigError                    an argument or a combination of arguments is wrong   (ValueError)
    │   └── UnknownArgumentError       a keyword that nothing reads                         (TypeError)
    ├── RequestError                   a request is refused before any work is done         (ValueError)
    │   ├── EmptyPromptError
    │   ├── TokenOutOfRangeError
    │   ├── ContextLengthError
    │   ├── SamplingParamsError
    │   ├── DuplicateRequestError
    │   ├── QueueFullError              too many requests or tokens wait already; try again later
    │   └── InvalidPromptsError        several prompts of one call are wrong
    ├── KernelError                    a kernel's arguments do not fit it or each other     (ValueError)
    ├── WorkerError                    a process that was to measure something has failed
    ├── RemoteError                    tests cannot be run elsewhere, or what came back cannot be believed
    └── CheckpointError                a model cannot be loaded
        ├── CheckpointNotFoundError
        ├── CorruptCheckpointError     a truncated or malformed file
        ├── TensorError                missing, unexpected, given twice, wrongly shaped
        ├── UnknownModelTypeError
        └── UnsupportedCheckpointError quantisation, rope type or activation that weft cannot run

A message names the argument and its value; the hint says what would work.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class WeftError(Exception):
    """Base of all errors raised on purpose; `hint` says what would work."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


class ConfigError(WeftError, ValueError):
    """An argument, or a combination of arguments, cannot be used."""


class UnknownArgumentError(ConfigError, TypeError):
    """A keyword that nothing reads."""

    def __init__(self, owner: str, name: str, known: Iterable[str], *, hint: str | None = None) -> None:
        """hint: what to do instead; None names the nearest of `known`."""
        self.name = name
        super().__init__(f"{owner} got an unknown argument {name!r}", hint=hint or nearest(name, known))


class RequestError(WeftError, ValueError):
    """A request refused before any work is done. `index` is its place in the list of prompts, if it has one."""

    index: int | None = None

    def at(self, index: int) -> "RequestError":
        """The same error, its message naming the place of the prompt in the caller's list."""
        self.index = index
        self.message = f"prompts[{index}]: {self.message}"
        self.args = (self.message if self.hint is None else f"{self.message}\nhint: {self.hint}",)
        return self


class EmptyPromptError(RequestError):
    """A prompt without a single token."""


class TokenOutOfRangeError(RequestError):
    """A token id outside the vocabulary."""


class ContextLengthError(RequestError):
    """A prompt that leaves no room for a new token in the context."""


class SamplingParamsError(RequestError):
    """A sampling parameter outside its range."""


class DuplicateRequestError(RequestError):
    """A request id that is still in use."""


class QueueFullError(RequestError):
    """Too many requests or tokens wait already; the same request may be served later."""


class InvalidPromptsError(RequestError):
    """Several prompts of one call are wrong: `errors` maps the place of each to its error."""

    def __init__(self, errors: Mapping[int, RequestError]) -> None:
        self.errors = dict(errors)
        lines = "\n".join(f"  {error}".replace("\n", "\n  ") for error in self.errors.values())
        super().__init__(f"{len(self.errors)} prompts cannot be served:\n{lines}")


class KernelError(WeftError, ValueError):
    """Tensors that a kernel cannot take: dtype, shape, head counts, layout, device. Raised before it is launched."""


class WorkerError(WeftError):
    """A process that was started to measure something has ended, hangs, or runs another tree than it was given."""


class RemoteError(WeftError):
    """Tests cannot be run on another machine, or what came back of them cannot be believed."""


class CheckpointError(WeftError):
    """A model cannot be loaded."""


class CheckpointNotFoundError(CheckpointError):
    """No such folder, file or hub model, or nothing in it to load."""


class CorruptCheckpointError(CheckpointError):
    """A truncated or malformed file."""


class TensorError(CheckpointError):
    """A tensor is missing, unexpected, given twice or wrongly shaped; nothing half-loaded is returned."""


class UnknownModelTypeError(CheckpointError):
    """A model family that weft does not have."""


class UnsupportedCheckpointError(CheckpointError):
    """A checkpoint whose quantisation, rope type or activation weft cannot run."""


def shown(value: object) -> str:
    """A value for a message: its `repr`, which Python has none of for numbers of thousands of digits.

    >>> shown("yes"), shown(10**5000)
    ("'yes'", 'a number of 16610 bits')
    """
    try:
        return repr(value)
    except ValueError:
        if isinstance(value, int):
            return f"a number of {value.bit_length()} bits"
        return f"a {type(value).__name__} that holds a number of thousands of digits"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint line: the known name closest to `name`, or all of them.

    >>> nearest("max_token", ["max_tokens", "seed"])
    "did you mean 'max_tokens'?"
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else "known names: " + ", ".join(names)
