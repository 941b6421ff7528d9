"""One request and its progress, in plain Python: the scheduler's view of it. Knows no device and no text."""

from dataclasses import dataclass, field
from typing import Literal

from weft.inference.sampling_params import SamplingParams
from weft.inference.token_logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False, kw_only=True, slots=True)
class Request:
    """Tokens read so far (prompt, then output) and how far their keys and values are in the cache.

    seed: the sampling seed, drawn for the request if its params name none.
    stop_token_ids: every id that ends it, EOS included unless ignored.
    cache_salt: only requests of the same salt share prefixes.
    arrival_s: when it came, on the engine's clock, in seconds.
    priority: smaller is sooner.   user: whose share it is charged to.   ttft_deadline_s: seconds to its first token.
    num_computed_tokens: tokens whose keys and values are in the cache once the steps planned so far are done.
    num_unread_tokens: tokens that those steps sample and that nobody has read.
    has_started: a step with it was launched.
    num_cached_tokens: tokens found in the prefix cache when it was admitted to the first of these.
    num_published_blocks, prefix_entry: how many of its blocks others can find, and the cache's entry of the last.
    num_scored_tokens: tokens of the prompt after which the next one is scored by the steps planned so far.
    prompt_logprobs: scores read so far, of the prompt's second token and on; None if unwanted or already given out.
    max_len: total tokens at which it ends by length: of max_tokens and the context, the nearer.
    has_ended: whatever is still sampled for it is dropped.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_len: int
    cache_salt: str | None = None
    arrival_s: float = 0.0
    priority: int = 0
    user: str | None = None
    ttft_deadline_s: float | None = None
    num_computed_tokens: int = 0
    num_unread_tokens: int = 0
    has_started: bool = False
    num_cached_tokens: int = 0
    num_published_blocks: int = 0
    prefix_entry: int = -1
    num_scored_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    has_ended: bool = False

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def num_tokens(self) -> int:
        """Tokens read: what an admission can bring."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """What the request still chases: the prompt's rest, or the one token sampled last, read or not."""
        return len(self.token_ids) + self.num_unread_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """One token away from its next output."""
        return len(self.token_ids) + self.num_unread_tokens - self.num_computed_tokens == 1

    @property
    def needs_scores(self) -> bool:
        """Whether some of its prompt is to be computed for the scores' sake, wherever its keys and values may lie."""
        return self.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens - 1

    def stop_after(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Whether the token just appended ends the request: why, and the stop token if it was one.

        A stop token wins over the length, as in HuggingFace and vLLM: the last allowed token may be the EOS.
        """
        if token in self.stop_token_ids:
            return "stop", token
        if len(self.token_ids) >= self.max_len:
            return "length", None
        return None
