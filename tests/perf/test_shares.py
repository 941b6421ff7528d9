"""How near a decode step comes to what the device can copy in the same run; see docs/speed_gates.md.

Measured by `weft bench steps` in a process of its own, without this test run's checks and NaN fill, which cost time.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from weft.benchmark.shares import decode_shares
from weft.testing.snapshots import ShareSnapshot

pytestmark = [pytest.mark.gpu, pytest.mark.perf]

BATCHES = (1, 8, 64)
_WEFT = "from weft.cli import main; raise SystemExit(main())"


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    path: Path = tmp_path_factory.mktemp("shares") / "steps.jsonl"
    asked = f"bench steps --shape llama-1b --batch {','.join(map(str, BATCHES))} --context 512 --repetitions 2 --json"
    subprocess.run([sys.executable, "-c", _WEFT, *asked.split(), str(path)], check=True)
    return decode_shares([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


@pytest.mark.parametrize("batch", BATCHES)
def test_share_of_the_copy_bandwidth_that_a_decode_step_reaches(
    batch: int, shares: dict[int, dict[str, Any]], snapshot: SnapshotAssertion
) -> None:
    assert shares[batch] == snapshot.use_extension(ShareSnapshot)
