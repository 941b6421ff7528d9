"""What a law found: it holds, it is broken, or it was not judged, and in which words. Knows no law."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    HOLDS = "holds"
    BROKEN = "broken"
    NOT_JUDGED = "not judged"


class NotJudged(Exception):  # noqa: N818 (no error: an outcome)
    """A law finds nothing that it could judge. Says why."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """words: what was seen, in which way the law is broken, or why it was not judged."""

    law: str
    outcome: Outcome
    words: str


def name_of(law: Callable[..., object]) -> str:
    """A law's name is the sentence that it is called.

    >>> def no_block_has_two_owners(): ...
    >>> name_of(no_block_has_two_owners)
    'no block has two owners'
    """
    return law.__name__.replace("_", " ")
