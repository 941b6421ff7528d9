"""What a trial says of a fault. Only an ordinary failure of each test that was named is a kill."""

from dataclasses import dataclass
from typing import Literal

from weft.testing.planted.fault import Fault
from weft.testing.planted.trial import Trial

Kind = Literal["killed", "survived", "wrong killer", "timed out", "invalid", "stale"]

_MEANINGS = {
    2: "pytest was interrupted or could not collect",
    3: "pytest had an internal error",
    4: "pytest did not know the tests or the options",
    5: "pytest found no test",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """detail: why, for people.   failed: the tests that saw it.   seconds: what its tests took, start included.

    wrong killer: tests failed, but one that was named did not.   invalid: the tests did not judge a program, or not
    this one.   stale: the text to be replaced is not there any more.
    """

    fault: Fault
    kind: Kind
    seconds: float
    failed: tuple[str, ...] = ()
    detail: str = ""

    @property
    def is_expected(self) -> bool:
        return self.kind == ("killed" if self.fault.expect == "killed" else "survived")

    @property
    def is_error(self) -> bool:
        """Nothing can be said of the tests, since it was not the fault that they met."""
        return self.kind in ("invalid", "stale")


def judge(fault: Fault, trial: Trial) -> Verdict:
    """The verdict of a trial in which the fault was planted."""
    kind, detail = _verdict(fault, trial)
    return Verdict(fault=fault, kind=kind, seconds=trial.seconds, failed=tuple(sorted(trial.failed)), detail=detail)


def sees(killer: str, node_ids: frozenset[str]) -> bool:
    """Whether one of these is the killer, or in it: a file, a class, or a test without its parameters."""
    return any(node_id == killer or node_id.startswith((f"{killer}::", f"{killer}[")) for node_id in node_ids)


def _verdict(fault: Fault, trial: Trial) -> tuple[Kind, str]:
    if trial.exit_code is None:
        return "timed out", f"its tests had not ended after {trial.seconds:.0f} s"
    if trial.strayed:
        return "invalid", f"imported from outside the copy: {', '.join(trial.strayed[:5])}"
    if trial.exit_code in (0, 1) and not (trial.passed or trial.failed or trial.errors):
        return "invalid", f"exit status {trial.exit_code}, and no test ran to its end\n{trial.output}"
    if trial.exit_code == 0:
        return "survived", f"{len(trial.passed)} tests passed"
    if trial.exit_code != 1:
        meaning = _MEANINGS.get(trial.exit_code, "the process was ended")
        return "invalid", f"exit status {trial.exit_code}: {meaning}\n{trial.output}"
    outside = trial.errors - trial.failed  # who failed and did not clear up has failed
    if outside:
        return "invalid", f"failed outside of the tests: {', '.join(sorted(outside)[:3])}\n{trial.output}"
    if trial.no_program:
        return "invalid", f"no program: {', '.join(sorted(trial.no_program)[:3])}\n{trial.output}"
    blind = [killer for killer in fault.killers if not sees(killer, trial.failed)]
    if blind:
        return "wrong killer", f"not seen by {', '.join(blind)}; failed: {', '.join(sorted(trial.failed)) or 'nothing'}"
    return "killed", ""
