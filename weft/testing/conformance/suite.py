"""A subject before the laws of its kind, and what comes of it: a report, or an error that names what is broken.

A law is a function: it returns what it has seen, asserts what must hold, and raises NotJudged where it finds nothing to
judge. Knows no law.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import TypeVar

from weft.errors import ConfigError, shown
from weft.testing.finding import Finding, NotJudged, Outcome, name_of

_LOGGER = logging.getLogger(__name__)

Subject = TypeVar("Subject")


@dataclass(frozen=True, kw_only=True)
class ConformanceReport:
    """Every law with its outcome; as text a line each.   kind: what the subject is one of."""

    kind: str
    subject: str
    findings: tuple[Finding, ...]

    def laws(self, outcome: Outcome) -> dict[str, str]:
        """The laws of this outcome, each with the words that it was found with."""
        return {finding.law: finding.words for finding in self.findings if finding.outcome is outcome}

    @property
    def not_judged(self) -> dict[str, str]:
        """The laws that nothing was said about, and why."""
        return self.laws(Outcome.NOT_JUDGED)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self.laws(outcome))} {outcome.value}" for outcome in Outcome)
        lines = (f"{finding.outcome.value}: {finding.law}: {finding.words}" for finding in self.findings)
        return "\n".join((f"{self.kind} {self.subject}: {counts}", *(line.replace("\n", "\n    ") for line in lines)))


class ConformanceError(AssertionError):
    """A law is broken, or none was judged. Its text is the report's; `report` holds it."""

    def __init__(self, report: ConformanceReport) -> None:
        self.report = report
        super().__init__(str(report))


def try_laws(kind: str, name: str, subject: Subject, laws: Sequence[Callable[[Subject], str]]) -> ConformanceReport:
    """Judge every law, whatever the ones before it found.

    Raises: ConformanceError with the whole report if one of them is broken, or if none of them could be judged.
    """
    return concluded(kind, name, [try_law(law, subject) for law in laws])


def try_law(law: Callable[[Subject], str], subject: Subject) -> Finding:
    """What one law says of the subject; whatever fails in it, the subject has failed."""
    try:
        return Finding(law=name_of(law), outcome=Outcome.HOLDS, words=law(subject))
    except NotJudged as nothing:
        return Finding(law=name_of(law), outcome=Outcome.NOT_JUDGED, words=str(nothing))
    except Exception as error:
        return Finding(law=name_of(law), outcome=Outcome.BROKEN, words=said(error))


def concluded(kind: str, name: str, findings: Sequence[Finding]) -> ConformanceReport:
    """The report of these findings; those that judged nothing are logged as well, so that no caller misses them.

    Raises: ConformanceError if a law is broken, or none was judged.
    """
    report = ConformanceReport(kind=kind, subject=name, findings=tuple(findings))
    if report.laws(Outcome.BROKEN) or not report.laws(Outcome.HOLDS):
        raise ConformanceError(report)
    for law, reason in report.not_judged.items():
        _LOGGER.warning("%s %s, not judged: %s: %s", kind, name, law, reason)
    return report


def require(subject: object, fits: bool, takes: str) -> None:
    """Raises: ConfigError that says what the suite takes, if the subject is nothing of the kind."""
    if not fits:
        raise ConfigError(f"{shown(subject)} cannot be judged", hint=f"the suite takes {takes}; docs/conformance.md")


@contextmanager
def given(words: str) -> Iterator[None]:
    """Whatever fails inside was given this: an AssertionError that begins with the words, whatever it was before."""
    try:
        yield
    except NotJudged:
        raise
    except Exception as error:
        raise AssertionError(f"given {words}: {said(error)}") from error


def must(raises: type[BaseException], attempt: Callable[[], object], words: str) -> None:
    """Assert that the attempt raises an error of this type."""
    try:
        attempt()
    except raises:
        return
    raise AssertionError(f"{words}, and raises no {raises.__name__}")


def said(error: BaseException) -> str:
    """An assertion by its words, any other error by its type as well; and what Hypothesis noted about it.

    >>> said(AssertionError("two owners")), said(KeyError(3))
    ('two owners', 'fails by KeyError: 3')
    """
    words = str(error)
    if not isinstance(error, AssertionError):
        words = f"fails by {type(error).__name__}: {words}{_place(error)}"
    return "\n".join((words or "an assertion without words", *getattr(error, "__notes__", ())))


def _place(error: BaseException) -> str:
    """Where it was raised, since a report has no traceback."""
    frames = extract_tb(error.__traceback__)
    return f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def require_hypothesis(kind: str) -> None:
    """Raises: ConfigError if Hypothesis is not installed, which makes the inputs of some laws."""
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the conformance of {kind} is judged on inputs that Hypothesis makes, and hypothesis is not installed",
            hint="pip install hypothesis",
        ) from error
