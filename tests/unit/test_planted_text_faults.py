"""Faults that others shipped, planted in the way from tokens to text: each law convicts its own.

A fault is a replacement in the source of one module; one whose text is no longer there is an error.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit import detokenizing
from tests.unit.detokenizing import byte_tokens, check, check_open_windows
from tests.unit.made_tokenizers import made
from tests.unit.test_output_processor import Words, expected, step
from tests.unit.test_stop_strings import naive
from weft import SamplingParams
from weft.errors import SamplingParamsError
from weft.inference.step_output import StepOutput
from weft.tokenizer.hub import HubTokenizer

ROUNDS = 300


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HubTokenizer]:
    return {name: made(name, tmp_path_factory.mktemp("planted")) for name in ("byte level", "byte fallback")}


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    def call(name: str, *edits: tuple[str, str]) -> ModuleType:
        real = import_module(name)
        path = Path(str(real.__file__))
        source = path.read_text(encoding="utf-8")
        for old, new in edits:
            assert source.count(old) == 1, f"{path.name} holds {source.count(old)} times: {old!r}"
            source = source.replace(old, new)
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        exec(compile(source, str(path), "exec"), module.__dict__)
        return module

    return call


def judge_detokenizer(module: ModuleType, tokenizers: dict[str, HubTokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detokenizing, "detokenizer", module.detokenizer)
    for tokenizer in tokenizers.values():
        chance, spelled, size = random.Random(1), byte_tokens(tokenizer), len(tokenizer.inner)

        def words(text: str, tokenizer: HubTokenizer = tokenizer) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        parts = [
            *([spelled[byte] for byte in text.encode()] for text in ("😀", "é", "你", "a")),
            *([spelled[byte] for byte in half] for half in (b"\xff", b"\xed\xa0", b"\xf0\x9f", b"\x98\x80", b"\xe4")),
            *(words(text) for text in (" row", "by", "if:\n    x", "你好")),
            [words("a ")[-1]],
            [size - 5],
            [size - 4],
            [size],
        ]
        for _ in range(ROUNDS):
            tokens = [token for _ in range(chance.randrange(2, 9)) for token in chance.choice(parts)]
            cut = chance.randrange(len(tokens))
            check(tokenizer, tokens[:cut], tokens[cut:], skip=chance.random() < 0.5)
            check(tokenizer, tokens[:cut], [], skip=True)
    check_open_windows()


def judge_stop_strings(module: ModuleType) -> None:
    chance = random.Random(1)
    for _ in range(ROUNDS):
        stops = ["".join(chance.choices("ab", k=chance.randrange(1, 5))) for _ in range(chance.randrange(1, 4))]
        include, gated = chance.random() < 0.5, chance.randrange(3)
        pieces = ["".join(chance.choices("ab", k=chance.randrange(4))) for _ in range(6)]
        matcher = module.StopStrings(stops, include=include)
        shown = [matcher.push(piece, may_stop=place >= gated) for place, piece in enumerate(pieces)]
        text, match = naive("".join(pieces), stops, gate=len("".join(pieces[:gated])))
        given = "".join(shown) + matcher.finish()
        assert (given, matcher.match) == (text + (match or "") * include, match)
        assert "".join(pieces).startswith(given)


def judge_outputs(module: ModuleType) -> None:
    chance = random.Random(1)
    for _ in range(ROUNDS):
        tokens = [chance.randrange(5) for _ in range(chance.randrange(1, 9))]
        prompt = [chance.randrange(5) for _ in range(3)]
        stops = ["".join(chance.choices("ab", k=chance.randrange(1, 4))) for _ in range(chance.randrange(3))]
        params = SamplingParams(
            stop=stops,
            min_tokens=chance.randrange(4),
            include_stop_str_in_output=chance.random() < 0.5,
            max_tokens=None,
        )
        stop_token = chance.choice([None, 2])
        shown = tokens if stop_token is None else [*tokens, stop_token]
        ends_text = params.include_stop_str_in_output or stop_token is None
        text, count, stop = expected(
            shown if ends_text else tokens, stops, params.min_tokens, params.include_stop_str_in_output
        )
        if stop is None:
            count = len(shown)
        ended: list[tuple[str, str]] = []
        for streams in (False, True):
            ended.clear()
            processor = module.OutputProcessor(Words(), lambda *end: ended.append(end))  # noqa: B023
            processor.add("r", None, prompt, params, streams=streams)
            answers: list[Any] = []
            left = list(shown)
            while left and processor.open_requests:
                size = chance.randrange(1, 3)
                gained, left = step("r", *left[:size]), left[size:]
                if not left:
                    reason = "length" if stop_token is None else "stop"
                    gained = gained._replace(finished=True, finish_reason=reason, stop_reason=stop_token)
                output = processor.process(gained)
                answers += output.outputs if output is not None else []
            assert not processor.open_requests
            assert "".join(answer.text for answer in answers) == text
            assert [token for answer in answers for token in answer.token_ids] == shown[:count]
            assert answers[-1].stop_reason == (stop or stop_token)
            assert ended == ([("r", "stop")] if left or (stop is not None and not gained.finished) else [])


class FakeEngine:
    """Computes a prompt for one step, gives one token in the next and the end in the third; knows who came when."""

    def __init__(self) -> None:
        self.added: list[tuple[int, str, Any]] = []
        self.steps, self.open = 0, dict[str, int]()

    @property
    def num_calls(self) -> int:
        return len(self.added) + self.steps

    def add_request(self, name: str, prompt: Sequence[int], params: SamplingParams) -> int:
        self.added.append((self.steps, name, params))
        self.open[name] = 0
        return params.seed or 0

    def step(self) -> list[StepOutput]:
        self.steps += 1
        self.open = {name: count + 1 for name, count in self.open.items() if count < 3}
        return [
            step(name, 0, reason="length" if count == 3 else None) for name, count in self.open.items() if count > 1
        ]

    def has_unfinished_requests(self) -> bool:
        return any(count < 3 for count in self.open.values())

    def finish(self, name: str, reason: Any) -> StepOutput | None:
        return step(name, reason=reason) if self.open.pop(name, None) is not None else None

    def abort(self, name: str) -> StepOutput | None:
        return self.finish(name, "abort")


def judge_text_engine(module: ModuleType) -> None:
    engine = FakeEngine()
    params = SamplingParams(n=3, seed=2**64 - 1, prompt_logprobs=0, stop="x", bad_words=[[1]])
    text = module.TextEngine(engine, Tokens())
    text.add_request("r", None, [1, 2], params)
    outputs = []
    while text.has_unfinished_requests():
        outputs += text.step()
    assert [(when, name) for when, name, _ in engine.added] == [(0, "r/0"), (2, "r/1"), (2, "r/2")]
    assert [asked.seed for _, _, asked in engine.added] == [2**64 - 1, 0, 1]
    assert [asked.prompt_logprobs for _, _, asked in engine.added] == [0, None, None]
    assert [(asked.n, asked.stop, asked.bad_words) for _, _, asked in engine.added] == [(1, (), ((1,),))] * 3
    assert [[answer.index for answer in output.outputs] for output in outputs] == [[0, 1, 2]]
    for steps in range(4):
        text.add_request("again", None, [1, 2], params)
        for _ in range(steps):
            text.step()
        text.abort("again")
        for _ in range(3):
            assert text.step() == []
        assert not engine.open
        assert (text._following, len(text._due)) == ({}, 0)


class Tokens(Words):
    def encode(self, text: str, **options: bool) -> list[int]:
        return [ord(character) for character in text]


DETOKENIZER = [
    ("a word before bytes counted to them", "if not self._window and self._pieces.fall", "if self._pieces.fall"),
    (
        "bytes shown one by one",
        'if self._pieces.fallback_byte(token_id):\n            return ""',
        "if False:\n            pass",
    ),
    ("a truncated character lost", 'return "" if self._is_empty else self._characters.finish()', 'return ""'),
    ("an answer without text shows the prompt's", 'return "" if self._is_empty else self._char', "return self._char"),
    ("a prompt's open character forgotten", "self._characters.push(tail[-_OPEN_BYTES:])", "pass"),
    (
        "special tokens shown",
        "pieces.special if skip_special_tokens else frozenset()\n        self._characters",
        "frozenset()\n        self._characters",
    ),
    ("half of a surrogate pair waited for", "if part and 0xA0 <= part[-1] < 0xC0", "if False"),
    ("a prompt's open bytes counted as shown", "len(self._window) - last.num_open]", "len(self._window)]"),
    ("the text of the window given out again", "piece = text[self._shown : whole]", "piece = text[:whole]"),
    ("an open character counted as shown", "len(self._decode(tail)) - num_held", "len(self._decode(tail))"),
]
STOP_STRINGS = [
    ("not across pieces", "state, root = self._state, self._root", "state, root = self._root, self._root"),
    ("no second chance within a beginning", "while (following :=", "if (following :="),
    ("one inside another not seen", "state.stop = state.stop or shorter.stop", "pass"),
    ("the gate left open", "if may_stop and state.stop", "if state.stop"),
    ("too little held back", "depth if state.after else shorter.num_held", "shorter.num_held"),
    ("what was held back lost", 'text, self._held = self._held, ""', 'text, self._held = "", ""'),
    ("never shown though asked for", "return text if self._include else text[", "return text["),
]
_ENDED = "if not step.finished:\n                self._finish"
_SHOWN = "self._show(self._detokenizer.push(token)):\n                "
_MADE = "self._stop_strings = StopStrings(params.stop, include=params.include_stop_str_in_output)"
_READ = """
                prompt = tokenizer.detokenizer(())
                self._stop_strings.push("".join(map(prompt.push, prompt_token_ids)), may_stop={})
                self._stop_strings._held = ""
"""
OUTPUTS = [
    ("looked for in the prompt", _MADE, _MADE + _READ.format(True)),
    ("begun in the prompt", _MADE, _MADE + _READ.format(False)),
    ("tokens after the match kept", f"{_SHOWN}return", f"{_SHOWN}pass"),
    ("a stop token shown", "is_hidden = place == last and", "is_hidden = False and"),
    ("min_tokens one too few", "self._num_tokens > self._min_tokens", "self._num_tokens >= self._min_tokens"),
    ("the engine not told", _ENDED, _ENDED.replace("not step.finished", "False")),
    ("the engine told of what it knows", _ENDED, _ENDED.replace("not step.finished", "True")),
    ("a stream that says all again", "self._token_ids, self._pieces = [], []", "pass"),
    ("the stop string not named", '"stop", self._stop_strings.match', '"stop", None'),
    ("what was held back lost", "self._pieces.append(self._stop_strings.finish())", "pass"),
    ("stop strings not looked for", "if params.stop:", "if False:"),
]
TEXT_ENGINE = [
    ("one seed for all", "(seed + index) % 2**64", "seed"),
    ("a seed beyond 64 bits", "(seed + index) % 2**64", "seed + index"),
    ("all at once", "self._following[engine_ids[0]] = _other_answers(", "self._due += _other_answers("),
    ("the prompt scored for each", "prompt_logprobs=None)", "prompt_logprobs=first.prompt_logprobs)"),
    ("an abort that leaves those who wait", "self._following.pop(engine_id, None)", "pass"),
]


def _ids(faults: list[tuple[str, str, str]]) -> list[str]:
    return [name for name, _, _ in faults]


@pytest.mark.parametrize("fault", DETOKENIZER, ids=_ids(DETOKENIZER))
def test_a_fault_of_detokenising_is_convicted(
    fault: tuple[str, str, str],
    plant: Callable[..., ModuleType],
    tokenizers: dict[str, HubTokenizer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = plant("weft.tokenizer.detokenizer", fault[1:])
    with pytest.raises(AssertionError):
        judge_detokenizer(module, tokenizers, monkeypatch)


@pytest.mark.parametrize("fault", STOP_STRINGS, ids=_ids(STOP_STRINGS))
def test_a_fault_of_stop_strings_is_convicted(fault: tuple[str, str, str], plant: Callable[..., ModuleType]) -> None:
    module = plant("weft.stop_strings", fault[1:])
    with pytest.raises(AssertionError):
        judge_stop_strings(module)


@pytest.mark.parametrize("fault", OUTPUTS, ids=_ids(OUTPUTS))
def test_a_fault_of_outputs_is_convicted(fault: tuple[str, str, str], plant: Callable[..., ModuleType]) -> None:
    module = plant("weft.output_processor", fault[1:])
    with pytest.raises(AssertionError):
        judge_outputs(module)


@pytest.mark.parametrize("fault", TEXT_ENGINE, ids=_ids(TEXT_ENGINE))
def test_a_fault_of_several_answers_is_convicted(fault: tuple[str, str, str], plant: Callable[..., ModuleType]) -> None:
    module = plant("weft.text_engine", fault[1:])
    with pytest.raises((AssertionError, SamplingParamsError)):
        judge_text_engine(module)


def test_nobody_innocent_is_convicted(
    plant: Callable[..., ModuleType], tokenizers: dict[str, HubTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_detokenizer(plant("weft.tokenizer.detokenizer"), tokenizers, monkeypatch)
    judge_stop_strings(plant("weft.stop_strings"))
    judge_outputs(plant("weft.output_processor"))
    judge_text_engine(plant("weft.text_engine"))
