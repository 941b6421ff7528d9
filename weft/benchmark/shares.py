"""From rows of `weft bench` to parts of what the device reached in the same run, which a slow day does not move.

A decode step reads weights, head, keys and values once at least: those bytes over its time, over the rate at which the
same process copied just then. A copy reads and writes, so a step that only reads may come to more than 1. A prompt
multiplies: its operations over its time, over the rate of a large product in that process.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.benchmark.decode_steps import read_bytes
from weft.benchmark.prefill_steps import prompt_flops
from weft.benchmark.shapes import shape_config

# Over eight sessions on H200s the rate of copies moved by 3.3 %, and within one a step of llama-1b by 3.1 % at most
# (`results/h200.jsonl`, 2026-11-29): the two together, rounded up.
DECODE_TOLERANCE = 0.07
# Over the same eight sessions the rate of products moved by 8.4 %, and within one the time to the first token of a lone
# prompt of llama-1b by 0.3 %: together, rounded up. That prompt had 128 tokens; no run has measured longer ones yet.
PREFILL_TOLERANCE = 0.09

_CASE = re.compile(r": (\d+) requests at a context of ([\d,]+)$")
_PROMPTS = re.compile(r": \d+ prompts of ([\d,]+) tokens, ")
_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_PROVENANCE = (
    "date",
    "commit",
    "dirty",
    "device",
    "driver",
    "python",
    "torch",
    "triton",
    "calibration",
    "spread",
    "notes",
)


def decode_shares(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """By batch size a row of a snapshot: share, tolerance, and all that the share rests on.

    records: lines of a `--json` file; other experiments and other metrics are passed over.
    """
    shares = {}
    for record in records:
        if (record["experiment"], record["metric"]) != ("steps", "decode step"):
            continue
        found = _CASE.search(record["case"])
        assert found is not None, f"the case says no batch and context: {record['case']!r}"
        batch, context = (int(number.replace(",", "")) for number in found.groups())
        itemsize = _ITEMSIZES[record["dtype"]]
        num_bytes = read_bytes(shape_config(record["model"]), itemsize=itemsize, batch=batch, context=context)
        gb_per_s = num_bytes / (record["value"] * 1e6)
        share = gb_per_s / record["calibration"]["copy_gb_per_s"]
        shares[batch] = _row("share of copy bandwidth", record, share, DECODE_TOLERANCE) | {"step_ms": record["value"]}
    return shares


def prefill_shares(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """By tokens of a prompt the same, of rows of `weft bench prefill`."""
    shares = {}
    for record in records:
        if (record["experiment"], record["metric"]) != ("prefill", "a prompt"):
            continue
        found = _PROMPTS.search(record["case"])
        assert found is not None, f"the case says no length of prompts: {record['case']!r}"
        length = int(found[1].replace(",", ""))
        gflop_per_s = prompt_flops(shape_config(record["model"]), length) / (record["value"] * 1e6)
        share = gflop_per_s / record["calibration"]["gemm_gflop_per_s"]
        shares[length] = _row("share of the GEMM rate", record, share, PREFILL_TOLERANCE)
        shares[length] |= {"prompt_ms": record["value"]}
    return shares


def _row(metric: str, record: Mapping[str, Any], share: float, tolerance: float) -> dict[str, Any]:
    said = {name: record[name] for name in ("case", "dtype", *_PROVENANCE)}
    return {"metric": metric, "value": round(share, 4), "tolerance": tolerance} | said
