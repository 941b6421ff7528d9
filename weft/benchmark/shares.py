"""From rows of `weft bench steps` to parts of what the device reached in the same run, which a slow day does not move.

A decode step reads weights, head, keys and values once at least: those bytes over its time, over the rate at which the
same process copied just then. A copy reads and writes, so a step that only reads may come to more than 1.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.benchmark.decode_steps import read_bytes
from weft.benchmark.shapes import shape_config

# Over eight sessions on H200s the rate of copies moved by 3.3 %, and within one a step of llama-1b by 3.1 % at most
# (`results/h200.jsonl`, 2026-11-29): the two together, rounded up.
DECODE_TOLERANCE = 0.07

_CASE = re.compile(r": (\d+) requests at a context of ([\d,]+)$")
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
        shares[batch] = {
            "metric": "share of copy bandwidth",
            "case": record["case"],
            "dtype": record["dtype"],
            "value": round(gb_per_s / record["calibration"]["copy_gb_per_s"], 4),
            "tolerance": DECODE_TOLERANCE,
            "step_ms": record["value"],
        } | {name: record[name] for name in _PROVENANCE}
    return shares
