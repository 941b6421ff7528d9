"""The standing prompts of the checks, every shape of input that has broken an engine, and those of a user's file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ConfigError, RequestError

_FABLE = (
    "The clockmaker of the lower town kept one clock that ran backwards. Visitors laughed at it, children timed races "
    "by it, and the mayor asked twice to have it stopped. The clockmaker answered that a clock which goes the wrong "
    "way at an even pace is still an honest clock: one has only to subtract. "
)
_LEDGER = "\n".join(
    f"{day:03d} | herring {day * 7 % 43} | rope {day * 11 % 29} | lamps {day * 5 % 17}" for day in range(56)
)
_TURN = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class StandingPrompt:
    """`content` is a text, or the turns of a chat for the model's own template."""

    name: str
    content: str | Sequence[_TURN]


def _text(name: str, content: str) -> StandingPrompt:
    return StandingPrompt(name=name, content=content)


def _chat(name: str, *turns: tuple[str, str]) -> StandingPrompt:
    return StandingPrompt(name=name, content=tuple({"role": role, "content": content} for role, content in turns))


STANDING_PROMPTS: tuple[StandingPrompt, ...] = (
    _text("one token", "The"),
    _text("two tokens", "Once upon"),
    _text("a question", "What is the boiling point of water at the top of a high mountain?"),
    _text("facts", "The three largest planets of the solar system are"),
    _text("arithmetic", "17 + 25 = 42\n19 + 24 = 43\n38 + 47 ="),
    _text("mid-word", "The committee postponed its deci"),
    _text("mid-number", "Pi is approximately 3.14159265"),
    _text("one block of 16", " red green blue" * 5 + " red"),
    _text("one block of 64", " north east south west" * 16),
    _text("a block and one", " north east south west" * 16 + " north"),
    _text("repeated word", "again " * 120),
    _text("repeated line", "All work is checked twice.\n" * 24),
    _text("python", 'def merge(left, right):\n    """Merge two sorted lists."""\n    result = []\n'),
    _text("c", "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n"),
    _text("sql", "CREATE TABLE customers (\n    id INTEGER PRIMARY KEY,\n    name VARCHAR(80),\n   "),
    _text("json", '{"name": "weft", "version": 1, "layers": [{"index": 0, "heads": 9}, {"index": 1, "heads":'),
    _text("html", '<ul class="menu">\n  <li><a href="/home">Home</a></li>\n  <li><a href="'),
    _text("table", "| city | country | river |\n|---|---|---|\n| Paris | France | Seine |\n| Vienna |"),
    _text("chinese", "北京是中国的首都，上海是"),
    _text("arabic", "عاصمة مصر هي القاهرة وعاصمة فرنسا هي"),
    _text("russian", "Москва стоит на берегу реки"),
    _text("german", "Die Brücke über den Fluss wurde im Jahre 1890"),
    _text("emoji", "Weather today: ☀️🌧️🌈 and tomorrow: 🎉👩‍🚀🇫🇷"),
    _text("mixed scripts", "hello 你好 привет مرحبا γειά 👋 means"),
    _text("newlines", "First.\n\n\nSecond.\r\n\r\nThird.\t\tFourth.\n\n"),
    _text("spaces", "a  b   c    d     e      f"),
    _text("punctuation", "...!!! ??? --- ((( [[[ {{{ <<< ||| ### $$$ %%%"),
    _chat("chat, one turn", ("user", "Name one use of a spoon.")),
    _chat("chat, with system", ("system", "You answer in one short sentence."), ("user", "Why is the sea salty?")),
    _chat(
        "chat, three turns",
        ("user", "Give me a word that rhymes with light."),
        ("assistant", "Night."),
        ("user", "Now use both in a sentence."),
    ),
    _text("700 tokens of prose", _FABLE * 11 + "One winter the tower clock failed, and"),
    _text("1,000 tokens of numbers", "day | goods | stock\n" + _LEDGER + "\n056 | herring"),
)


def read_prompts(path: Path) -> dict[str, str]:
    """Prompts of a file, by what the table calls them: line number and text."""
    hint = "a file of UTF-8 that holds a prompt a line"
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # no text, or no name of a file
        raise ConfigError(f"--prompts {path}: {error}", hint=hint) from error
    prompts = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        text = line
        if line.startswith('"'):
            try:
                decoded = json.loads(line)
            except json.JSONDecodeError:
                decoded = None  # a line that only begins with a quotation mark is a text like any other
            text = decoded if isinstance(decoded, str) else line
        if not text:
            raise RequestError(f"--prompts {path}, line {number}: an empty prompt")
        prompts[f"{number}: {text}"] = text
    if not prompts:
        raise ConfigError(f"--prompts {path} holds no prompt", hint=hint)
    return prompts
