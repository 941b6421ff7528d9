"""An engine before all laws: which hold, which are broken, which were not judged and why; and how that looks."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.testing.engines import open_engine
from weft.testing.engines.interface import ModelUnderTest
from weft.testing.finding import Finding, Outcome
from weft.testing.laws import LAWS, judge
from weft.testing.oracle import Oracle
from weft.testing.reference import Remembered
from weft.testing.report import versions
from weft.testing.trial import Trial

_STYLES = {Outcome.HOLDS: "green", Outcome.BROKEN: "red", Outcome.NOT_JUDGED: "yellow"}


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """engine: the name it was asked for by; description: its own words."""

    engine: str
    description: str
    model: str
    dtype: str
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        """Every law that was judged holds, and at least one was."""
        return self.count(Outcome.HOLDS) > 0 and self.count(Outcome.BROKEN) == 0

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        counts = ", ".join(f"{self.count(outcome)} {outcome.value}" for outcome in Outcome)
        return f"{'PASS' if self.passed else 'FAIL'}: {counts}; {self.engine} on {self.model} in {self.dtype}"

    def count(self, outcome: Outcome) -> int:
        return sum(finding.outcome is outcome for finding in self.findings)

    def as_json(self) -> str:
        """Everything that the table shows, and the versions it was measured with."""
        rows = [asdict(finding) | {"outcome": finding.outcome.value} for finding in self.findings]
        content = {
            "passed": self.passed,
            "verdict": self.verdict,
            "engine": self.engine,
            "description": self.description,
            "model": self.model,
            "dtype": self.dtype,
            "laws": rows,
            "versions": versions(),
        }
        return json.dumps(content, indent=2, ensure_ascii=False)


def try_engine(
    name: str,
    model: ModelUnderTest,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int,
    progress: Callable[[Finding], None] = lambda finding: None,
) -> EngineReport:
    """Load the engine and the reference, and judge every law.

    progress: called with each finding as it comes.
    Raises: ConfigError if there is no such engine; what loading it raises.
    """
    engine = open_engine(name, model)
    try:
        reference = Remembered(Oracle(model.checkpoint.tokenizer, dtype=model.dtype, device=model.device))
        trial = Trial(engine=engine, reference=reference, model=model, prompts=prompts, max_new_tokens=max_new_tokens)
        findings = []
        for law in LAWS:
            findings.append(judge(law, trial))
            progress(findings[-1])
    finally:
        engine.close()
    return EngineReport(
        engine=name, description=engine.description, model=model.name, dtype=model.dtype_name, findings=findings
    )


def show_engine_report(report: EngineReport, console: Console) -> None:
    """One row a law, and the verdict."""
    table = Table(caption=Text(report.description), caption_justify="left")
    table.add_column("law", max_width=40)
    table.add_column("outcome", no_wrap=True)
    table.add_column("what was seen, or why not")
    for finding in report.findings:
        table.add_row(finding.law, Text(finding.outcome.value, style=_STYLES[finding.outcome]), Text(finding.words))
    console.print(table)
    console.print(report.verdict, markup=False, highlight=False)
