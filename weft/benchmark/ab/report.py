"""How a comparison looks: a table for people, which is Markdown as well, and a line of JSON with every turn."""

from dataclasses import asdict
from statistics import median
from typing import Any

from weft.benchmark.ab.comparison import Comparison
from weft.benchmark.ab.schedule import Arm
from weft.benchmark.ab.worktree import Tree
from weft.benchmark.provenance import Provenance

_HEADER = ("measure", "base", "head over base", "base over itself", "planted +10 %", "verdict")


def markdown(comparison: Comparison, base: Tree, head: Tree, *, threshold: float, provenance: Provenance) -> str:
    """The verdict, a row a measure with its intervals, and what it was measured on."""
    rows = [_HEADER, ("---",) * len(_HEADER)]
    for name, finding in comparison.findings.items():
        taken = [seconds for block in comparison.measures[name] for seconds in block[Arm.BASE]]
        numbers = (finding.head, finding.control, finding.planted)
        rows.append((name, f"{median(taken) * 1e3:.2f} ms", *map(str, numbers), finding.verdict))
    width = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    table = ["| " + " | ".join(cell.ljust(size) for cell, size in zip(row, width, strict=True)) + " |" for row in rows]
    blocks = len(next(iter(comparison.measures.values())))
    notes = [f"{name}: {finding.why}" for name, finding in comparison.findings.items() if finding.why]
    if not comparison.equal:
        notes.append("head computes something else than base: this compares unlike work")
    return "\n".join(
        [
            f"**{comparison.verdict}**: {_short(head)} against {_short(base)}, threshold {100 * threshold:g} %",
            "",
            *table,
            "",
            *notes,
            f"medians and their bounds over {blocks} blocks, each of which runs every arm twice in opposite orders",
            f"{provenance.device}; torch {provenance.torch}, python {provenance.python}; {provenance.date}",
        ]
    )


def record(
    comparison: Comparison, base: Tree, head: Tree, *, options: dict[str, Any], provenance: Provenance
) -> dict[str, Any]:
    """Everything, raw turns included: who doubts the verdict can judge anew."""
    return {
        "experiment": "ab",
        "base": base.commit,
        "head": head.commit,
        "verdict": comparison.verdict,
        "equal": comparison.equal,
        "findings": {name: asdict(finding) for name, finding in comparison.findings.items()},
        "measures": {name: list(blocks) for name, blocks in comparison.measures.items()},
        "options": options,
        "provenance": vars(provenance),
    }


def _short(tree: Tree) -> str:
    changed = " with uncommitted changes" if tree.commit.endswith("+") else ""
    return tree.commit[:12] + changed
