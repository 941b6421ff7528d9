"""What an engine is to the harness: jobs in, answers out, and an honest word on what it cannot do.

Knows no engine and no law. What an engine lacks is no fault; what it claims and does not give is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from weft.errors import ConfigError, nearest
from weft.models.checkpoint.interface import Checkpoint
from weft.tokenizer.hub import HubTokenizer

# dtype: the caller says what it computes in.   prompt_token_ids: takes prompts as ids, else as text.
# token_ids: answers in ids, else in text alone.   stop_token_ids, seeds: each request may bring its own.
Ability = Literal[
    "dtype", "prompt_token_ids", "token_ids", "logits", "logprobs", "finish_reasons", "stop_token_ids", "seeds"
]


@dataclass(frozen=True, kw_only=True)
class ModelUnderTest:
    """The checkpoint that engine and reference both serve.

    name: as the user wrote it.   dtype_is_given: the user named the dtype, so that even a server that cannot be told is
    taken to run in it.   max_model_len, max_num_seqs: room that the laws need: tokens of a sequence, requests at once.
    tokenizer: None where the checkpoint has none; an engine that takes token ids needs none.
    """

    name: str
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    max_num_seqs: int = 16
    dtype_is_given: bool = True
    tokenizer: HubTokenizer | None = None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def path(self) -> str:
        """The folder of the checkpoint, or its GGUF file."""
        location = self.checkpoint.tokenizer
        return str(location.folder if location.gguf_file is None else location.folder / location.gguf_file)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request. The model's own EOS ids end it as well as `stop_token_ids`.

    prompt_text: the same prompt for engines that lack prompt_token_ids; its tokens are `prompt_token_ids`.
    seed: sample with it, at temperature 1 from the whole vocabulary; None is greedy.
    """

    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    prompt_text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the engine said. A field is None only if the engine lacks the ability to give it.

    token_ids: the token that ended it included, be it EOS or a stop id.   text: for engines that lack token_ids.
    num_tokens: tokens said, for engines that count them but do not show them.
    finish_reason: "stop" for EOS and stop ids, "length" at max_new_tokens.
    logits: row t is what token t was chosen from, before any sampling parameter.   logprobs: of each token said.
    """

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    num_tokens: int | None = None
    finish_reason: str | None = None
    logits: Float[Tensor, "T V"] | None = None
    logprobs: tuple[float, ...] | None = None

    @property
    def said(self) -> tuple[int, ...] | str | None:
        """Tokens, or where there are none the text."""
        return self.text if self.token_ids is None else self.token_ids

    @property
    def length(self) -> int | None:
        """Tokens said, as far as the engine tells."""
        return self.num_tokens if self.token_ids is None else len(self.token_ids)


@runtime_checkable
class EngineUnderTest(Protocol):
    """An engine with the model loaded.

    description: which engine, version and settings, for the report.
    lacks: what it cannot do, each with the reason; all else it must do.
    """

    description: str
    lacks: Mapping[Ability, str]

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        """All of them, handed over together in this order; answers in the order of the jobs."""
        ...

    def close(self) -> None:
        """Give back memory and threads. It is not used again."""
        ...


@runtime_checkable
class EngineFactory(Protocol):
    """Loads the model. `argument`: what followed the engine's name and a colon."""

    def __call__(self, model: ModelUnderTest, argument: str | None) -> EngineUnderTest: ...


def checked(engine: Any) -> EngineUnderTest:
    """The engine, if it is one. Raises: ConfigError that says what it has not, or lacks that is no ability."""
    kind = type(engine).__name__
    missing = [name for name in ("description", "lacks", "answer", "close") if not hasattr(engine, name)]
    if missing:
        raise ConfigError(f"{kind} is no engine: it has no {', '.join(missing)}", hint="docs/verify.md has an example")
    if not isinstance(engine.lacks, Mapping):
        hint = "what it lacks, each with the reason: {'seeds': 'it samples nothing'}"
        raise ConfigError(f"{kind}.lacks is a {type(engine.lacks).__name__}, no mapping", hint=hint)
    for name in engine.lacks:
        if name not in get_args(Ability):
            raise ConfigError(
                f"{kind}.lacks names {name!r}, which is no ability", hint=nearest(name, get_args(Ability))
            )
    return engine
