"""What comes back is written into its own folders and nowhere else; names of GPUs are checked."""

from base64 import b64encode
from pathlib import Path

import pytest

from weft.errors import ConfigError, RemoteError
from weft.testing.remote.artefacts import artefact_folders, changed, fingerprints, write_artefact
from weft.testing.remote.gpu_names import checked_gpu

FOLDERS = artefact_folders(["tests/perf/test_a.py"])
CONTENT = b64encode(b"{}\n").decode()


def test_what_has_changed_comes_back_to_where_it_was(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    folder = there / "tests/perf/baselines/h200"
    folder.mkdir(parents=True)
    here.mkdir()
    (folder / "same.json").write_text("1")
    (folder / "other.json").write_text("1")
    before = fingerprints(there, FOLDERS)
    (folder / "other.json").write_text("2")
    (folder / "new.json").write_bytes(b"\x00\xff")
    (there / "tests/perf/test_a.py").write_text("not asked for")
    found = dict(changed(there, FOLDERS, before))
    assert {Path(path).name for path in found} == {"other.json", "new.json"}
    assert all(write_artefact(here, FOLDERS, path, content) for path, content in found.items())
    assert not any(write_artefact(here, FOLDERS, path, content) for path, content in found.items())
    assert (here / "tests/perf/baselines/h200/new.json").read_bytes() == b"\x00\xff"


@pytest.mark.parametrize(
    "path",
    [
        *("conftest.py", "tests/perf/test_a.py", "tests/unit/baselines/a.json", "baselines/a.json", ""),
        *("/tests/perf/baselines/a.json", "tests/perf/baselines/../test_a.py", "../tests/perf/baselines/a.json"),
        *(
            "tests/perf/baselines",
            "tests/perf/baselines2/a.json",
            "tests/perf/baselines\\..\\a",
            "tests/perf/baselines/\0",
        ),
        "tests/perf/baselines/../../../../etc/passwd",
    ],
)
def test_nothing_is_written_outside_of_the_folders(tmp_path: Path, path: str) -> None:
    (tmp_path / "tests/perf/baselines").mkdir(parents=True)
    with pytest.raises(RemoteError, match="artefact"):
        write_artefact(tmp_path, FOLDERS, path, CONTENT)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_links_lead_nowhere(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    folder = root / "tests/perf/baselines"
    folder.mkdir(parents=True)
    outside.mkdir()
    (outside / "file").write_text("mine")
    (folder / "folder").symlink_to(outside)
    (folder / "link.json").symlink_to(outside / "file")
    (folder / "inner.json").symlink_to(root / "conftest.py")
    for name in ("folder/new.json", "link.json", "inner.json"):
        with pytest.raises(RemoteError, match="link"):
            write_artefact(root, FOLDERS, f"tests/perf/baselines/{name}", CONTENT)
    assert (outside / "file").read_text() == "mine"
    assert [*outside.iterdir()] == [outside / "file"]


@pytest.mark.parametrize("content", ["no base64!", "YQ", b64encode(bytes((16 << 20) + 1)).decode()])
def test_content_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(RemoteError, match="artefact"):
        write_artefact(tmp_path, FOLDERS, "tests/perf/baselines/a.json", content)


@pytest.mark.parametrize("name", ["H100!", "H100", "A100-80GB:8", "B200+", "RTX-PRO-6000", "T4:1"])
def test_gpus_that_modal_has(name: str) -> None:
    assert checked_gpu(name) == name
    assert checked_gpu(name.lower()) == name


@pytest.mark.parametrize(
    "name", ["", "V100", "H100:0", "H100:9", "H100:", "H100:two", "H100:1:1", "H100,A100", "H100:²"]
)
def test_gpus_that_it_does_not_have(name: str) -> None:
    with pytest.raises(ConfigError, match="--modal"):
        checked_gpu(name)


def test_a_file_after_a_bare_option_is_told_from_a_name() -> None:
    with pytest.raises(ConfigError, match=r"write --modal=H100!"):
        checked_gpu("tests/kernels")
