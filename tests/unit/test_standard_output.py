"""Standard output that nobody reads, that is full, or that cannot show every character."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.unit.test_llm import save_text_model
from weft.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_text_model(tmp_path_factory.mktemp("output"), bos=False))


def generate(model: str, *arguments: str) -> int:
    return main(
        ["generate", "na\u00efve \U0001f600", *arguments, "--model", model, "--max-tokens", "3", "--device", "cpu"]
    )


@pytest.mark.parametrize("arguments", [[], ["--stream"], ["--json"]], ids=["whole", "stream", "json"])
def test_who_stops_reading_ends_the_command(
    arguments: list[str], model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert generate(model, *arguments) == 141
    assert "rror" not in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_a_full_disk_is_told(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8") as output:  # noqa: PTH123  # a device
        monkeypatch.setattr(sys, "stdout", output)
        assert generate(model) == 2
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_answer_is_shown_whatever_the_terminal_can_show(
    encoding: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {}
    for name in ("utf-8", encoding):
        for arguments in ([], ["--json"]):
            raw = io.BytesIO()
            with io.TextIOWrapper(raw, encoding=name) as output:
                monkeypatch.setattr(sys, "stdout", output)
                assert generate(model, *arguments) == 0
                output.flush()
                shown[name, bool(arguments)] = raw.getvalue().decode(name)
    assert json.loads(shown[encoding, True]) == json.loads(shown["utf-8", True])
    assert shown[encoding, False] == shown["utf-8", False].encode(encoding, "backslashreplace").decode(encoding)
