"""Snapshots of costs: exact, a folder a device, and what one device updates leaves the others alone."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

COUNTS = """
    from weft.testing import snapshots

    def test_costs(snapshot, monkeypatch):
        monkeypatch.setattr(snapshots, "device_key", lambda: "{device}")
        assert {{"steps": {steps}}} == snapshot.use_extension(snapshots.DeviceCountSnapshot)
"""


def costs(pytester: pytest.Pytester, *arguments: str, device: str = "here", steps: int = 20) -> pytest.RunResult:
    pytester.makepyfile(test_costs=COUNTS.format(device=device, steps=steps))
    return pytester.runpytest("-p", "no:cacheprovider", *arguments)


def baseline(pytester: pytest.Pytester, device: str) -> Path:
    return pytester.path / "baselines" / device / "test_costs" / "test_costs.json"


def test_a_count_is_held_exactly_and_an_update_leaves_other_devices_alone(pytester: pytest.Pytester) -> None:
    there = baseline(pytester, "there")
    there.parent.mkdir(parents=True)
    there.write_text('{"steps": 7}\n')
    costs(pytester).assert_outcomes(failed=1)
    assert not baseline(pytester, "here").exists(), "what was never measured is stored unasked"
    costs(pytester, "--snapshot-update").assert_outcomes(passed=1)
    assert there.read_text() == '{"steps": 7}\n'
    result = costs(pytester, steps=21)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*steps: 20 -> 21 (+5.0 %)*"])
    costs(pytester).assert_outcomes(passed=1)
    costs(pytester, device="there", steps=7).assert_outcomes(passed=1)


def test_a_cost_that_is_gone_or_new_is_a_difference() -> None:
    from weft.testing.snapshots import differences

    assert differences({"steps": 20, "copies": 1}, {"steps": 20}) == ["copies: 1 -> nothing"]
    assert differences({"steps": 20}, {"steps": 20, "copies": 1}) == ["copies: nothing -> 1"]


def test_the_name_of_a_device_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.testing.snapshots import device_key

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA RTX 6000/Ada  (48GB)")
    assert device_key() == "nvidia-rtx-6000-ada-48gb"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_key() == "cpu"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "nothing was ever stored: --snapshot-update writes what was found now"),
        ("", "nothing was ever stored: --snapshot-update writes what was found now"),
        ("<<<<<<< ours", "the snapshot is no JSON object: --snapshot-update writes what was found now"),
        ("[20]", "the snapshot is no JSON object: --snapshot-update writes what was found now"),
        ('{"steps": NaN}', "steps: nan -> 20"),
    ],
)
def test_a_snapshot_that_is_no_snapshot_fails_in_words_and_is_mended_by_an_update(
    pytester: pytest.Pytester, content: str | None, message: str
) -> None:
    here = baseline(pytester, "here")
    if content is not None:
        here.parent.mkdir(parents=True)
        here.write_text(content)
    result = costs(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{message}*"])
    result.stdout.no_fnmatch_line("*Traceback*")
    costs(pytester, "--snapshot-update").assert_outcomes(passed=1)
    costs(pytester).assert_outcomes(passed=1)
