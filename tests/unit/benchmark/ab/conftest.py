"""A repository whose package has a speed, and a workload whose clock is made up: no machine moves it."""

import subprocess
from pathlib import Path

import pytest

# Parts move a clock of their own, by the package's speed and some noise; the program that times them reads it.
WORKLOAD = """
import sys
from random import Random

import speed

now = 0.0
noise = Random(speed.SEED)


def read():
    global now
    now += 1e-4
    return now


def work():
    global now
    now += speed.SECONDS * (1 + noise.uniform(-0.01, 0.01))
    print("chatter")
    return speed.ANSWER


def build(options):
    sys.modules["__main__"].perf_counter = read
    return {"work": work}
"""


class Repository:
    """commit: a new one, with the package `speed` as given; its full name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "nobody")
        self.git("config", "user.email", "nobody@localhost")

    def git(self, *arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=self.folder, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    def write(self, seconds: float = 0.1, *, seed: int = 0, answer: str = "yes", extra: str = "") -> None:
        lines = [f"SECONDS, SEED, ANSWER = {seconds}, {seed}, {answer!r}", extra, ""]
        (self.folder / "speed.py").write_text("\n".join(lines))

    def commit(self, seconds: float = 0.1, *, seed: int = 0, answer: str = "yes", extra: str = "") -> str:
        self.write(seconds, seed=seed, answer=answer, extra=extra)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "speed")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    folder = tmp_path / "repository"
    folder.mkdir()
    return Repository(folder)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.py"
    path.write_text(WORKLOAD)
    return path
