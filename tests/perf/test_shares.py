"""How near steps come to what the device can copy and multiply in the same run; see docs/speed_gates.md.

Measured by `weft bench` in a process of its own, without this test run's checks and NaN fill, which cost time.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from weft.benchmark.shares import decode_shares, prefill_shares
from weft.testing.snapshots import ShareSnapshot

pytestmark = [pytest.mark.gpu, pytest.mark.perf]

BATCHES = (1, 8, 64)
LENGTHS = (512, 2048, 8192)
_WEFT = "from weft.cli import main; raise SystemExit(main())"


def measured(folder: Path, asked: str) -> list[dict[str, Any]]:
    """The rows of `weft bench`, asked for so."""
    path = folder / "rows.jsonl"
    subprocess.run([sys.executable, "-c", _WEFT, "bench", *asked.split(), "--json", str(path)], check=True)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    asked = f"steps --shape llama-1b --batch {','.join(map(str, BATCHES))} --context 512 --repetitions 2"
    return decode_shares(measured(tmp_path_factory.mktemp("steps"), asked))


@pytest.fixture(scope="module")
def shares_of_prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    asked = f"prefill --shape llama-1b --prompts {','.join(map(str, LENGTHS))}"
    return prefill_shares(measured(tmp_path_factory.mktemp("prefill"), asked))


@pytest.mark.parametrize("batch", BATCHES)
def test_share_of_the_copy_bandwidth_that_a_decode_step_reaches(
    batch: int, shares: dict[int, dict[str, Any]], snapshot: SnapshotAssertion
) -> None:
    assert shares[batch] == snapshot.use_extension(ShareSnapshot)


@pytest.mark.parametrize("length", LENGTHS)
def test_share_of_the_rate_of_products_that_prefill_reaches(
    length: int, shares_of_prompts: dict[int, dict[str, Any]], snapshot: SnapshotAssertion
) -> None:
    assert shares_of_prompts[length] == snapshot.use_extension(ShareSnapshot)
