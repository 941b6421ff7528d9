"""What a command is to write is tried before the work, and left as it was."""

from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.options import writable


@pytest.mark.parametrize("name", ["", ".", "no/such/file", "a\0b", "a" * 300, "\udcff\0"], ids=ascii)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--json .* (is a folder|is no file in|cannot be written)") as caught:
        writable("--json", tmp_path / name if name else Path())
    assert caught.value.hint


def test_a_file_that_may_not_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for anybody but root, who may write everything."""

    def refused(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ConfigError, match=r"^--json .*rows\.jsonl' cannot be written: .*Permission denied") as caught:
        writable("--json", tmp_path / "rows.jsonl")
    assert caught.value.hint


def test_a_file_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    for path in (new, old, None):
        writable("--json", path)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert old.read_text() == "kept"


def test_a_link_to_a_file_that_is_not_there_yet_is_left_as_it_was(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("new")
    writable("--json", link)
    assert link.is_symlink()
    assert not (tmp_path / "new").exists()
