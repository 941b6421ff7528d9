"""A toy model whose every token and every cached value is a hash of what came before, and an executor that runs plans.

It stands in for runner, model and cache: each slot holds the tag of the tokens up to it, and a step may only read slots
that hold the right tags. Whatever aliases, leaks, goes stale or is read before it is written shows at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.inference.plan import StepPlan
from weft.inference.sampling_params import SamplingParams
from weft.inference.token_logprobs import StepLogprobs, TokenLogprobs

# Hashes of integers are the same in every process, so that a failure can be replayed.
VOCAB_SIZE = 50


def next_token(token_ids: Sequence[int]) -> int:
    """What the toy model says after these tokens."""
    return hash((-1, *token_ids)) % VOCAB_SIZE


def scored(token_ids: Sequence[int], token: int, num_top: int) -> TokenLogprobs:
    """What the toy model knows of a token after these: it differs from place to place and from count to count."""
    size = VOCAB_SIZE if num_top < 0 else num_top
    top = tuple((place, hash((-4, place, *token_ids)) / 2.0) for place in range(size))
    return TokenLogprobs(token, hash((-3, token, *token_ids)) / 2.0, 1 + token, top)


def sequential(prompt: Sequence[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The output of a request that runs alone, without any engine."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class ToyHandle:
    """A step of the toy model; what it sampled may be read whenever one likes."""

    sampled: list[list[int]]
    scores: StepLogprobs | None = None

    def tokens(self) -> list[list[int]]:
        return self.sampled

    def logprobs(self) -> StepLogprobs | None:
        return self.scores


def never_fails(token_ids: Sequence[int]) -> bool:
    return False


class ToyExecutor:
    """Runs step plans over fake slots. fails: whether the logits after these tokens are not finite."""

    def __init__(self, block_size: int, fails: Callable[[Sequence[int]], bool] = never_fails) -> None:
        self._block_size = block_size
        self._fails = fails
        self._slots: dict[tuple[int, int], int] = {}  # (block, offset) -> tag
        self._tables: dict[int, list[int]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}
        self._params: dict[int, SamplingParams] = {}

    def launch(self, plan: StepPlan) -> ToyHandle:
        """Run the step, and score what its requests want."""
        sampled = self.execute(plan)
        return ToyHandle(sampled, self._score(plan))

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """The tokens that the step samples, as `StepHandle.tokens` gives them."""
        changed = {admission.row for admission in plan.admissions} | {grown.row for grown in plan.new_blocks[0]}
        assert changed <= set(plan.rows), "the plan changes a row that it does not run"
        for admission in plan.admissions:
            self._tokens[admission.row] = list(admission.token_ids)
            self._computed[admission.row] = admission.num_computed_tokens
            self._tables[admission.row] = []
            self._params[admission.row] = admission.params
        for grown in plan.new_blocks[0]:
            table = self._tables[grown.row]
            assert grown.first <= len(table), "a block table has a hole"
            table[grown.first : grown.first + len(grown.blocks)] = grown.blocks
        for source, target in plan.block_copies:
            for offset in range(self._block_size):
                self._slots.pop((target, offset), None)
                if (source, offset) in self._slots:
                    self._slots[target, offset] = self._slots[source, offset]
        written: set[tuple[int, int]] = set()
        columns = list(zip(plan.rows, plan.num_new_tokens, plan.num_logit_rows, strict=True))
        assert len(set(plan.rows)) == len(plan.rows), "two requests share a row"
        for row, count, _ in columns:
            for position in range(self._computed[row], self._computed[row] + count):
                slot = self._slot(row, position)
                assert slot not in written, f"slot {slot} is written twice in a step"
                written.add(slot)
                self._slots[slot] = _tag(self._tokens[row][: position + 1])
            self._computed[row] += count
        for row in plan.rows:
            self._check_reads(row)
        return [self._sample(row) if wanted else [] for row, _, wanted in columns]

    def _sample(self, row: int) -> list[int]:
        tokens = self._tokens[row]
        assert self._computed[row] == len(tokens), "logits are asked for before the last token is computed"
        if self._fails(tokens):
            tokens.append(0)  # as the device does: it goes on with a valid id until the host drops the request
            return [-1]
        tokens.append(next_token(tokens))
        return [tokens[-1]]

    def _score(self, plan: StepPlan) -> StepLogprobs | None:
        """After the step: of the tokens that it sampled, and of those of prompts that follow what it computed."""
        sampled, prompts = {}, []
        for column, (row, wanted) in enumerate(zip(plan.rows, plan.num_logit_rows, strict=True)):
            num_top, tokens = self._params[row].logprobs, self._tokens[row]
            if num_top is not None and wanted:
                sampled[column] = [scored(tokens[:-1], tokens[-1], num_top)]
        for part in plan.prompt_rows:
            row = plan.rows[part.column]
            start = self._computed[row] - plan.num_new_tokens[part.column] + part.first
            after = range(start + 1, start + 1 + len(part.next_token_ids))
            assert after.stop <= self._computed[row] + 1, "what is not computed is scored"
            tokens = self._tokens[row]
            assert tuple(tokens[place] for place in after) == part.next_token_ids, "another token follows"
            prompts.append([scored(tokens[:place], tokens[place], part.num_top) for place in after])
        return StepLogprobs(sampled, prompts) if sampled or prompts else None

    def _check_reads(self, row: int) -> None:
        """Every token that the step computes reads all before it, in this step or an earlier one."""
        for position in range(self._computed[row]):
            found = self._slots.get(self._slot(row, position))
            expected = _tag(self._tokens[row][: position + 1])
            assert found == expected, f"row {row} reads another's value at position {position}"

    def _slot(self, row: int, position: int) -> tuple[int, int]:
        column, offset = divmod(position, self._block_size)
        assert column < len(self._tables[row]), f"row {row} has no block for position {position}"
        return self._tables[row][column], offset


def _tag(token_ids: Sequence[int]) -> int:
    return hash(tuple(token_ids))
