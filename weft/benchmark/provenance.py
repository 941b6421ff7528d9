"""Where and with what a number was measured: commit, device, versions, and how fast this machine was just now."""

import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weft.benchmark.calibration import calibrate

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """calibration: unit by name, measured in the same run (see `calibrate`).   driver: of the GPU; None on CPUs."""

    date: str
    commit: str | None
    dirty: bool | None
    device: str
    driver: str | None
    python: str
    torch: str
    triton: str | None
    calibration: dict[str, float]

    @classmethod
    def here(cls, device: Any) -> "Provenance":
        """Of this process and this `torch.device`. Measures for about a second."""
        import torch

        commit, dirty = commit_of_tree()
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit,
            dirty=dirty,
            device=_device_name(device),
            driver=_driver() if device.type == "cuda" else None,
            python=platform.python_version(),
            torch=torch.__version__,
            triton=installed_version("triton"),
            calibration=calibrate(device),
        )


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit_of_tree() -> tuple[str | None, bool | None]:
    """The commit of the source tree and whether it was changed since; nothing for an installed package."""
    try:
        # A virtual environment may lie inside another project's repository: ask for this very file.
        _git("ls-files", "--error-unmatch", "__init__.py")
        return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _device_name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.split("\n", maxsplit=1)[0].strip() or None
