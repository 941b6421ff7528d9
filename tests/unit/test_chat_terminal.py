"""`weft chat` on a terminal of its own: what is typed, interrupted and shown, with a model that answers at once."""

import codecs
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pty = pytest.importorskip("pty", reason="a terminal needs a POSIX system")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="whether a process waits is read in /proc")

TALKS = """
import fcntl, sys, termios, time
from types import SimpleNamespace
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
from weft.chat_command import Chat, typed

class Echo:
    def stream_chat(self, messages, params):
        said = messages[-1]["content"]
        for word in [f"{len(messages)}", ":", said[:9], chr(27) + "[2J"]:
            if said == "mute":
                time.sleep(60)
            yield SimpleNamespace(outputs=[SimpleNamespace(text=word, token_ids=[0], finish_reason=None)])
            if said == "endless" and word == ":":
                time.sleep(60)

answered = Chat(Echo(), None, None, as_json=False, interactive=True).run(typed())
print("left", answered)
"""


def waits(stat: str) -> bool:
    """Whether a process does. stat: as /proc has it: number, (name), state, and so on; a name may hold anything."""
    return stat.rpartition(")")[2].split()[0] == "S"


class Terminal:
    def __init__(self) -> None:
        self.end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TALKS],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(inner)
        self.shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character

    def type(self, keys: str, *, until: str) -> str:
        """What is shown from now on, up to this; the line that is typed is shown too."""
        os.write(self.end, keys.encode())
        begin, deadline = len(self.shown), time.monotonic() + 60
        while re.search(until, self.shown[begin:]) is None:
            assert select.select([self.end], [], [], deadline - time.monotonic())[0], self.shown
            try:
                self.shown += self._decoder.decode(os.read(self.end, 4096))
            except OSError:  # Linux: the other end is closed
                break
        return self.shown[begin:].replace("\r", "")

    def interrupt(self, *, until: str) -> str:
        """Ctrl-C when the program waits: CPython loses one that comes between a prompt and the wait for its line."""
        deadline = time.monotonic() + 60
        while not waits(Path(f"/proc/{self.process.pid}/stat").read_text()):
            assert time.monotonic() < deadline, self.shown
            time.sleep(0.01)
        return self.type("\x03", until=until)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.end)


PROMPT = r"> $"


@pytest.mark.parametrize(
    ("stat", "expected"), [("1 (python) S 2", True), ("1 (python) R 2", False), ("1 (a) S (b) R 2", False)]
)
def test_what_is_taken_for_a_program_that_waits(stat: str, expected: bool) -> None:
    assert waits(stat) is expected


def test_a_conversation_on_a_terminal(terminal: Terminal) -> None:
    terminal.type("", until=PROMPT)
    assert "1:hello␛[2J\n> " in terminal.type("hello\r", until=r"\n> $"), "control characters are pictures"
    assert terminal.type("\r", until=PROMPT).count(">") == 1, "an empty line asks nothing"
    terminal.type("endless\r", until="3:")
    terminal.interrupt(until=PROMPT)
    assert "5:so␛" in terminal.type("so\r", until=r"\n> $"), "what was said before the interrupt is remembered"
    terminal.type("mute\r", until="mute\r\n")
    terminal.interrupt(until=PROMPT)
    assert "7:xxxxxxxxx␛" in terminal.type("x" * 300 + "\r", until=r"␛.*\s+> $"), "what was never answered is not"
    terminal.type("half a li", until="half a li")
    assert "Ctrl-D or /exit leaves" in terminal.interrupt(until=r"leaves\s+> $")
    assert "did you mean '/reset'?" in terminal.type("/rset\r", until=r"\?\s+> $")
    assert "1:new␛" in terminal.type("/reset\rnew\r", until=r"␛.*\s+> $")
    assert "left False" in terminal.type("\x04", until="left False")  # one command was unknown
    assert terminal.process.wait(60) == 0
