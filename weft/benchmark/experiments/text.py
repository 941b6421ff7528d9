"""What a token's way to text costs the host: detokenising, stop strings, outputs; without an engine or a device.

The tokens are those of a text in many scripts, one a step as an engine gives them. What an answer costs must not depend
on how much of it there is, so that its last tokens are measured beside its first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from weft import __version__
from weft.benchmark.experiments import ANYWHERE, Experiment
from weft.benchmark.options import option
from weft.benchmark.progress import Progress
from weft.benchmark.row import Row, Target
from weft.inference.sampling_params import SamplingParams
from weft.inference.step_output import StepOutput
from weft.inference.token_logprobs import TokenLogprobs
from weft.options import positive
from weft.testing.prompts import STANDING_PROMPTS

if TYPE_CHECKING:
    from weft.tokenizer.hub import HubTokenizer

_TARGET = Target(relation="<", value=20.0)  # microseconds a token
_FLAT = Target(relation="<=", value=1.5)
_STOPS = (
    "\n\nHuman:",
    "<|end_of_answer|>",
    "</answer>",
    "[DONE]",
    "The end of all.",
)  # as clients send them; none occurs
_CASES = {
    "text": SamplingParams(max_tokens=None),
    "text, 5 stop strings": SamplingParams(max_tokens=None, stop=_STOPS),
    "text, 5 stop strings, 5 logprobs": SamplingParams(max_tokens=None, stop=_STOPS, logprobs=5),
    "no text": SamplingParams(max_tokens=None, detokenize=False),
}


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    model: str = option("smollm2-135m", "whose tokenizer: alias, folder, .gguf file or hub id")
    tokens: int = option(8192, "of an answer")
    repetitions: int = option(5, "measured answers; medians are reported")

    def __post_init__(self) -> None:
        positive("TextOptions", tokens=self.tokens, repetitions=self.repetitions)


def run(options: TextOptions, progress: Progress) -> Iterator[Row]:
    """Raises: CheckpointError and its kinds at once for what has no tokenizer."""
    from weft.models.checkpoint.source import open_checkpoint
    from weft.tokenizer.hub import HubTokenizer

    location = open_checkpoint(options.model).tokenizer
    tokenizer = HubTokenizer(location.folder, location.gguf_file)
    return _rows(tokenizer, options, progress)


def _rows(tokenizer: "HubTokenizer", options: TextOptions, progress: Progress) -> Iterator[Row]:
    row = Row(
        experiment="text",
        system=f"weft, {tokenizer.pieces.decoding}",
        system_version=__version__,
        model=options.model,
        notes="one step output a token",
    )
    tokens = _tokens(tokenizer, options.tokens)
    advance = progress("answers", len(_CASES) * 2 * options.repetitions)
    for streams in (False, True):
        for name, params in _CASES.items():
            parts = []
            for _ in range(options.repetitions):
                parts.append(_answer(tokenizer, tokens, params, streams=streams))
                advance()
            case = f"{name}, {'streamed' if streams else 'whole'}, {options.tokens:,} tokens"
            each = [sum(seconds) / len(seconds) * 1e6 for seconds in parts]
            timed = Row(**(vars(row) | {"case": case}))
            yield timed.of("a token", each, "µs", target=_TARGET)
            if len(tokens) >= 8 and params.detokenize:
                quarter = len(tokens) // 4
                ratios = [sum(seconds[-quarter:]) / sum(seconds[:quarter]) for seconds in parts]
                yield timed.of("last quarter over first", ratios, "x", target=_FLAT)


def _tokens(tokenizer: "HubTokenizer", count: int) -> list[int]:
    texts = [prompt.content for prompt in STANDING_PROMPTS if isinstance(prompt.content, str)]
    once = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    return (once * (count // len(once) + 1))[:count]


def _answer(tokenizer: "HubTokenizer", tokens: Sequence[int], params: SamplingParams, *, streams: bool) -> list[float]:
    """Seconds of each token's step."""
    from weft.output_processor import OutputProcessor

    processor = OutputProcessor(tokenizer, _ended)
    processor.add("answer", None, list(tokens[:64]), params, streams=streams)
    top = tuple((token, -1.0 - place) for place, token in enumerate(tokens[: params.logprobs or 0]))
    seconds = []
    for place, token in enumerate(tokens, start=1):
        scores = () if params.logprobs is None else (TokenLogprobs(token, -0.5, 1, top),)
        is_last = place == len(tokens)
        step = StepOutput("answer", (token,), is_last, "length" if is_last else None, None, 0, scores)
        start = perf_counter()
        output = processor.process(step)
        seconds.append(perf_counter() - start)
        assert output is None or output.outputs[0].stop_reason is None, "a stop string of the benchmark is in its text"
    assert not processor.open_requests, "the answer has ended"
    return seconds


def _ended(request_id: str, reason: object) -> None:
    raise AssertionError("no stop string is in the text")


EXPERIMENT = Experiment(
    summary="microseconds of a token's way to text, without a device",
    examples=("text", "text --tokens 65536 --json results/text.jsonl"),
    options=TextOptions,
    run=run,
    collected=ANYWHERE,
)
