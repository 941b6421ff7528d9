"""A run on a GPU of Modal's. The client is imported when a run is opened: `uv sync --group modal`, and a token.

The image holds what `pyproject.toml` asks for; the tree is added beside it when a container starts, so that a change
to it builds nothing. Volumes keep weights, and Triton's compiled kernels by the versions that compiled them. Modal may
take a container away and run the same input again in another: that is another attempt (`ledger.py`).
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.errors import RemoteError
from weft.testing.remote.interface import Job
from weft.testing.remote.process import attempt, environment

_TREE, _CACHE = "/root/tree", "/cache"
_TIMEOUT_S = 3600
_TOKEN_HINT = "`modal token new`, or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET in the environment"


class ModalRunner:
    """One app for the run, one container for each job."""

    elsewhere = True

    def __init__(self, root: Path, gpu: str, *, may_fetch: bool = False, shows_output: bool = False) -> None:
        """gpu: as `checked_gpu` gives it.   may_fetch: jobs may add weights to the volume, which tests only read.
        shows_output: Modal's own words, as of an image that is built.
        """
        self.description = f"Modal, {gpu}"
        self._root, self._gpu, self._may_fetch, self._shows_output = root, gpu, may_fetch, shows_output
        self._open = ExitStack()
        self._function: Any = None

    def open(self) -> None:
        """Start the app. Raises: RemoteError without the client, a token, or a way to Modal."""
        modal = _client()
        try:
            if self._shows_output:
                self._open.enter_context(modal.enable_output())
            app, self._function = build(modal, self._root, self._gpu, may_fetch=self._may_fetch)
            self._open.enter_context(app.run())
        except modal.exception.AuthError as error:
            self.close()
            raise RemoteError(f"Modal does not know who asks: {error}", hint=_TOKEN_HINT) from error
        except Exception as error:  # the client's own errors, and those of what it rests on
            self.close()
            raise RemoteError(f"Modal: {type(error).__name__}: {error}") from error

    def run(self, job: Job) -> Iterator[str]:
        return self._function.remote_gen(job.to_json())

    def close(self) -> None:
        """Stop the app, and with it whatever still runs."""
        self._open.close()


def build(modal: ModuleType, root: Path, gpu: str, *, may_fetch: bool) -> tuple[Any, Any]:
    """The app and its function, from the text of a job to its events. Nothing of it speaks to Modal."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"  # as here: what goes to and fro is pickled
    image = (
        modal.Image.debian_slim(python_version=python)
        .apt_install("gcc", "libc6-dev")  # Triton compiles the launcher of each kernel
        .uv_sync(str(root))
        .env({"PYTHONPATH": _TREE, "HF_HOME": f"{_CACHE}/huggingface"})
        .add_local_dir(root, _TREE, ignore=left_out(root))
    )
    weights = modal.Volume.from_name("weft-huggingface", create_if_missing=True)
    volumes = {
        f"{_CACHE}/huggingface": weights if may_fetch else weights.with_mount_options(read_only=True),
        f"{_CACHE}/triton": modal.Volume.from_name("weft-triton", create_if_missing=True),
    }
    app = modal.App("weft-tests")
    function = app.function(
        image=image,
        gpu=gpu,
        volumes=volumes,
        timeout=_TIMEOUT_S,
        single_use_containers=True,  # nothing warms what is measured next
        serialized=True,
        include_source=False,  # the tree is there already
        is_generator=True,
    )(events_of)
    return app, function


def events_of(job: str) -> Iterator[str]:
    """The function that runs in the container. It is sent by name: what checks annotations may have wrapped it here."""
    root = Path.cwd()
    if os.environ.get("MODAL_IS_REMOTE"):
        root = Path(_TREE)
        versions = environment()
        kept = "-".join(f"{name}{versions.get(name, '')}" for name in ("python", "torch", "triton"))
        os.environ["TRITON_CACHE_DIR"] = f"{_CACHE}/triton/{kept}"
    yield from attempt(Job.from_json(job), root)


def left_out(root: Path) -> Callable[[Path], bool]:
    """Whether a file, relative to the root, stays here: what git ignores, or without git what is not source."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        kept = set(listed.stdout.split("\0"))
        return lambda path: path.as_posix() not in kept
    return lambda path: any(part.startswith(".") or part in ("__pycache__", "node_modules") for part in path.parts)


def _client() -> ModuleType:
    try:
        import modal
        import modal.exception
    except ImportError as error:
        hint = "uv sync --group modal, or another runner: --weft-runner=subprocess on a machine with a GPU"
        raise RemoteError("the package modal is not installed", hint=hint) from error
    return modal
