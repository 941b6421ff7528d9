"""How a verification looks: a bar while it works, a table and one verdict line after, and JSON for machines."""

import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from weft.testing.exactness import LOGIT_TOLERANCE, Comparison, Verdict, allowed_ties
from weft.testing.near_ties import Audit
from weft.testing.verify import Result

_MARKS = {Verdict.EQUAL: "yes", Verdict.TIE: "tie", Verdict.DIFFERENT: "NO"}


def show_progress(stage: str, total: int) -> Callable[[], None]:
    """A bar for one stage; the function returned moves it on by one prompt."""
    bar = tqdm(total=total, desc=stage, unit="prompt")

    def advance() -> None:
        bar.update()
        if bar.n >= total:
            bar.close()

    return advance


def show_table(result: Result, console: Console) -> None:
    """One row a prompt."""
    table = Table(caption=Text(result.description), caption_justify="left")
    table.add_column("prompt", overflow="ellipsis", no_wrap=True, max_width=32)
    for column in ("prompt tokens", "new tokens", "equal?", "first difference", "largest |Δlogit|", "smallest margin"):
        table.add_column(column, justify="right")
    for prompt, comparison in zip(result.prompts, result.comparisons, strict=True):
        place = comparison.first_difference
        table.add_row(
            Text(prompt.name.replace("\n", "⏎")),  # as it is: a prompt may hold what looks like markup
            str(len(prompt.token_ids)),
            str(comparison.num_tokens),
            _MARKS[comparison.verdict],
            "-" if place is None else str(place),
            f"{comparison.max_logit_difference:.1e}",
            f"{comparison.min_margin:.1e}",
            style="red" if comparison.verdict is Verdict.DIFFERENT else None,
        )
    console.print(table)
    for prompt, comparison in zip(result.prompts, result.comparisons, strict=True):
        if comparison.reason is not None:
            console.print(f"{_MARKS[comparison.verdict]}: {prompt.name!r}: {comparison.reason}", markup=False)


def verdict_line(result: Result) -> str:
    """The outcome in one line."""
    total, word = len(result.comparisons), "PASS" if result.passed else "FAIL"
    if result.audit is not None:
        return f"{word} (tier C): {_audit_words(result.audit)}; {result.num_equal} of {total} end as HuggingFace ends"
    largest = max((comparison.max_logit_difference for comparison in result.comparisons), default=0.0)
    ties = f", {result.num_ties} ties (at most {allowed_ties(result.num_positions)})" if result.num_ties else ""
    return (
        f"{word} (tier A): {result.num_equal} of {total} prompts equal HuggingFace generate token for token{ties}; "
        f"{result.num_positions} tokens; largest |Δlogit| {largest:.1e} (at most {LOGIT_TOLERANCE:.0e})"
    )


def write_json(result: Result, path: Path) -> None:
    """Everything that the table shows, and the versions it was measured with."""
    rows = [
        {"prompt": prompt.name, "num_prompt_tokens": len(prompt.token_ids), **_fields(comparison)}
        for prompt, comparison in zip(result.prompts, result.comparisons, strict=True)
    ]
    content = {
        "passed": result.passed,
        "verdict": verdict_line(result),
        "engine": result.description,
        "audit": None if result.audit is None else asdict(result.audit) | {"passed": result.audit.passed},
        "prompts": rows,
        "versions": versions(),
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """What a result depends on."""
    import transformers

    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def _fields(comparison: Comparison) -> dict[str, Any]:
    return vars(comparison) | {"verdict": comparison.verdict.value}


def _audit_words(audit: Audit) -> str:
    return (
        f"{audit.num_flips} of {audit.num_positions} positions flip (at most {audit.max_flips}; HuggingFace against "
        f"itself {audit.own_flips}), {audit.num_unexcused} beyond its noise of {audit.tolerance:.2g}; "
        f"mean KL {audit.mean_kl:.1e} (its own {audit.own_mean_kl:.1e})"
    )
