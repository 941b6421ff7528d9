"""Snapshots of costs for syrupy, as JSON in the folder `baselines/` beside the test, one folder a device.

Baselines lie outside `__snapshots__`, where an update on one device would delete what another has measured. A test
takes one with `snapshot.use_extension(CountSnapshot)`, and `--snapshot-update` writes this device's files only.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from syrupy.extensions.json import JSONSnapshotExtension
from syrupy.location import PyTestLocation

_ANY = "any"


class CountSnapshot(JSONSnapshotExtension):
    """Counts by name that are the same on every machine, held exactly."""

    @classmethod
    def device(cls) -> str:
        """The folder of the device whose costs these are."""
        return _ANY

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        path = Path(test_location.filepath)
        return str(path.parent / "baselines" / cls.device() / path.stem)

    @classmethod
    def discovery_dirname(cls, *, test_location: PyTestLocation) -> str:
        """Of other tests and other devices this extension neither reports nor deletes anything."""
        return cls.dirname(test_location=test_location)

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        return not [*self.diff_lines(serialized_data, snapshot_data)]

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        """What differs; a file that is not there or holds nothing of the kind differs, and says so."""
        try:
            stored = json.loads(snapshot_data)
        except (TypeError, ValueError):  # syrupy gives nothing for a file that is not there
            stored = None
        if isinstance(stored, dict):
            yield from self._differences(stored, json.loads(serialized_data))
        else:
            what = "the snapshot is no JSON object" if snapshot_data else "nothing was ever stored"
            yield f"{what}: --snapshot-update writes what was found now"

    def _differences(self, stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
        return differences(stored, found)


class DeviceCountSnapshot(CountSnapshot):
    """Counts by name that depend on the GPU at hand, which chooses kernels; held exactly."""

    @classmethod
    def device(cls) -> str:
        return device_key()


class ShareSnapshot(DeviceCountSnapshot):
    """A number relative to what the device reached in the same run, held within the tolerance that its row names.

    The row is a mapping with `metric`, `case`, `value`, `tolerance` and whatever it was measured with. Better by more
    than the tolerance fails as well: the baseline is stale, or the measurement is broken. So does another tolerance.
    """

    def _differences(self, stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
        difference = share_difference(stored, found)
        return [difference] if difference else []


def share_difference(stored: dict[str, Any], found: dict[str, Any]) -> str:
    """Nothing, or why the found row is not the stored one.

    >>> share_difference({"value": 0.5, "tolerance": 0.07}, {"value": 0.52, "tolerance": 0.07})
    ''
    >>> share_difference({"value": 0.5, "tolerance": 0.07}, {"value": 0.4, "tolerance": 0.07})
    'value: 0.5 -> 0.4 (-20.0 %), worse by more than 7 %'
    >>> share_difference({"value": 0, "tolerance": 0.07}, {"value": 0, "tolerance": 0.07})
    'stored: value=0 and tolerance=0.07 hold nothing: numbers above 0, the tolerance below 1'
    """
    for whose, row in (("stored", stored), ("found", found)):
        numbers = [row.get(name) for name in ("value", "tolerance")]
        if not all(isinstance(number, int | float) and number > 0 for number in numbers) or not row["tolerance"] < 1:
            named = "value={} and tolerance={}".format(*numbers)
            return f"{whose}: {named} hold nothing: numbers above 0, the tolerance below 1"
    same = ("metric", "case", "tolerance")
    lines = differences({name: stored.get(name) for name in same}, {name: found.get(name) for name in same})
    old, new, tolerance = stored["value"], found["value"], stored["tolerance"]
    if not old / (1 + tolerance) <= new <= old * (1 + tolerance):  # a NaN is outside
        direction = "better" if new > old else "worse"
        (moved,) = differences({"value": old}, {"value": new})
        lines.append(f"{moved}, {direction} by more than {100 * tolerance:g} %")
    return "; ".join(lines)


def device_key() -> str:
    """The device of this process as the name of a folder: `nvidia-h200`, or `cpu` where torch sees no GPU."""
    import torch

    return file_name(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


def file_name(device: str) -> str:
    """A device's name as that of a file or folder.

    >>> file_name("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return "-".join("".join(letter if letter.isalnum() else " " for letter in device.lower()).split())


def differences(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What changed, a line each, in the order of the names.

    >>> differences({"steps": 20, "copies": 1}, {"steps": 25})
    ['copies: 1 -> nothing', 'steps: 20 -> 25 (+25.0 %)']
    """
    lines = []
    for name in sorted({*stored, *found}):
        old, new = stored.get(name, "nothing"), found.get(name, "nothing")
        if old == new:
            continue
        line = f"{name}: {old} -> {new}"
        if isinstance(old, int | float) and isinstance(new, int | float) and old:
            line += f" ({(new / old - 1) * 100:+.1f} %)"
        lines.append(line)
    return lines
