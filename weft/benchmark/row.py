"""One measured number and all that it depends on: the rows of `results/*.jsonl`."""

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import SEEK_END
from pathlib import Path
from statistics import median
from typing import Any

from weft.benchmark.provenance import Provenance

NOT_MEASURED = "not measured"
_RELATIONS = {">=": operator.ge, "<=": operator.le, "<": operator.lt, "==": operator.eq}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a value is meant to be. A missed target is a result, not an error."""

    relation: str
    value: int | float

    def met(self, measured: float) -> bool:
        return bool(_RELATIONS[self.relation](measured, self.value))

    def __str__(self) -> str:
        return f"{self.relation} {self.value:g}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number. `system` is who was measured; `spread` is (largest - smallest) / median over the repetitions.

    failed: what was asked for broke off, and the notes say why.
    """

    experiment: str
    case: str = ""
    system: str = ""
    system_version: str = ""
    model: str = ""
    dtype: str = ""
    metric: str = ""
    value: float = 0.0
    unit: str = ""
    repetitions: int = 1
    spread: float | None = None
    seed: int | None = None
    notes: str = ""
    target: Target | None = None
    failed: bool = False

    def by(self, system: str, version: str) -> "Row":
        """The same row about that system."""
        return replace(self, system=system, system_version=version)

    def of(
        self,
        metric: str,
        values: Sequence[int | float],
        unit: str,
        *,
        spread: float | None = None,
        target: Target | None = None,
        notes: str = "",
    ) -> "Row":
        """The same row with a number in it: the median of the values."""
        return replace(
            self,
            metric=metric,
            value=float(median(values)),
            unit=unit,
            repetitions=len(values),
            spread=spread,
            target=target,
            notes="; ".join(filter(None, (self.notes, notes))),
        )

    def unmeasured(self, reason: str, *, failed: bool) -> "Row":
        """The same row in place of numbers, which says why there are none. failed: it was tried; else it cannot be."""
        return replace(self.of(NOT_MEASURED, [0], "", notes=f"{self.system}: {reason}"), failed=failed)

    def over(self, repetitions: int) -> "Row":
        """The same row, its value already a quantile of so many."""
        return replace(self, repetitions=repetitions)

    @property
    def is_measured(self) -> bool:
        """Whether there is a number, and not only a reason why there is none."""
        return not self.metric.endswith(NOT_MEASURED)

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "met" if self.target.met(self.value) else "missed"


def as_record(row: Row, provenance: Provenance) -> dict[str, Any]:
    """The flat record that a line of JSON holds; a target is a wish, not a measurement, and stays out."""
    left_out = ("target", "failed", "notes")
    measured = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in left_out}
    return measured | vars(provenance) | {"notes": row.notes}


def append_json(rows: Sequence[Row], provenance: Provenance, path: Path) -> None:
    """Add one line a row to the file, which need not exist yet."""
    for row in rows:
        append_line(as_record(row, provenance), path)


def append_line(record: Mapping[str, Any], path: Path) -> None:
    """Add an object to the file, which need not exist yet. Raises: ValueError for a NaN, which JSON does not know.

    A last line that somebody was kept from ending stays by itself.
    """
    line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if _is_torn(path) else "") + line)


def _is_torn(path: Path) -> bool:
    """Whether the file ends in the middle of a line; a device or a pipe has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, SEEK_END)
        return file.read(1) != b"\n"
