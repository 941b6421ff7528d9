"""Faults of how a step reaches the device: sizes that are captured, padding, overlap."""

from functools import partial

from weft.testing.planted.fault import Fault

_SIZES = "tests/unit/inference/test_step_sizes.py"
_PROGRAM = "tests/unit/inference/test_step_program.py"
_OVERLAP = "tests/unit/inference/test_overlap_faults.py::test_the_law_holds"
_sizes = partial(Fault, file="weft/inference/step_sizes.py", tier="tests/unit")
_program = partial(Fault, file="weft/inference/step_program.py", tier="tests/unit")
_runner = partial(Fault, file="weft/inference/runner.py", tier="tests/unit")
_pipeline = partial(Fault, file="weft/inference/pipeline.py", tier="tests/unit")
_scheduler = partial(Fault, file="weft/inference/scheduler.py", tier="tests/unit")

GRAPHS = (
    _sizes(
        name="the largest batch has no graph",
        old="return [*(size for size in (*close, *far) if size < max_num_seqs), max_num_seqs]",
        new="return [size for size in (*close, *far) if size <= max_num_seqs]",
        why="vllm#57355: speed falls off a cliff at the top.",
        killers=(f"{_SIZES}::test_every_step_fits_the_size_that_serves_it",),
    ),
    _sizes(
        name="a step runs in the size below it",
        old="place = bisect_left(self._decodes, num_tokens)",
        new="place = max(bisect_left(self._decodes, num_tokens) - 1, 0)",
        why="Requests of the step are left out.",
        killers=(f"{_SIZES}::test_every_step_fits_the_size_that_serves_it",),
    ),
    _sizes(
        name="a longer step is padded to as many tokens as requests",
        old="[tokens for tokens in counts if tokens > count]",
        new="[tokens for tokens in counts if tokens >= count]",
        why="It would be taken for a step of decodes.",
        killers=(f"{_SIZES}::test_every_step_fits_the_size_that_serves_it",),
    ),
    _program(
        name="padding takes the row of a request",
        old="(*plan.rows, *[self._scratch] * padding)",
        new="(*plan.rows, *[0] * padding)",
        why="vllm#43810: padding writes where somebody lives.",
        killers=("tests/unit/inference/test_padded_steps.py::test_padding_changes_no_token_and_no_slot_of_others[-]",),
    ),
    _program(
        name="inputs of the step before are taken for those of this one",
        old="        if self._written.get(name) == written:\n",
        new="        if name in self._written:\n",
        why="transformers#29114's opposite: what changed is not copied.",
        killers=(f"{_PROGRAM}::test_a_steady_step_takes_nothing_from_the_host",),
    ),
    _program(
        name="every chunk's token counts",
        old="return (self._all_kept if size.is_decode else self._keeps)[: size.num_requests]",
        new="return self._all_kept[: size.num_requests]",
        why="A chunk that stops short overwrites the next token of its prompt.",
        killers=(f"{_PROGRAM}::test_a_chunk_of_one_token_is_no_decode",),
    ),
    _runner(
        name="a chunk of one token is taken for a decode",
        old="        if num_tokens == num_requests > len(kept):\n",
        new="        if False:\n",
        why="Its token is kept.",
        killers=(f"{_PROGRAM}::test_a_chunk_of_one_token_is_no_decode",),
    ),
    _runner(
        name="tokens are read from the step before",
        old="program.token_log[step % LOG_ENTRIES, :num_requests]",
        new="program.token_log[(step - 1) % LOG_ENTRIES, :num_requests]",
        why="sglang-jax#1487: a ring that is read at the wrong place.",
        killers=(f"{_PROGRAM}::test_tokens_can_be_read_a_step_late_and_never_when_overwritten",),
    ),
    _runner(
        name="blocks are copied after the step",
        old="            if plan.block_copies:\n                self._cache.copy_blocks(plan.block_copies)\n",
        new="            if plan.block_copies and len(plan.rows) > 1:\n"
        "                self._cache.copy_blocks(plan.block_copies)\n",
        why="A request alone reads a block that nobody filled.",
        killers=("tests/unit/inference/test_paged_engine.py::test_a_prompt_sent_twice_is_answered_as_without_a_cache",),
    ),
)

OVERLAP = (
    _pipeline(
        name="the step before is read first",
        old="                launched, self._unread = self._unread, launched\n",
        new="                pass\n",
        why="The host waits for the device in every step.",
        killers=(f"{_OVERLAP}[a_step_is_launched_before_the_one_before_is_read]",),
    ),
    _scheduler(
        name="unread tokens are not counted",
        old="            end = len(request.token_ids) + request.num_unread_tokens\n",
        new="            end = len(request.token_ids)\n",
        why="A request that awaits its token is given nothing.",
        killers=(f"{_OVERLAP}[unread_tokens_count]",),
    ),
    _scheduler(
        name="a request that awaits its last token is served again",
        old="+ unread >= request.max_len",
        new="+ unread > request.max_len",
        why="A token beyond max_len is computed, and perhaps a block taken for it.",
        killers=(f"{_OVERLAP}[whoever_ends_by_length_computes_no_token_too_many]",),
    ),
    _scheduler(
        name="a step that is forgotten leaves tokens to be read",
        old="            request.num_published_blocks = request.num_computed_tokens = 0\n"
        "            request.num_unread_tokens = 0\n",
        new="            request.num_published_blocks = request.num_computed_tokens = 0\n",
        why="After an interrupt a request awaits a token that never comes.",
        killers=(f"{_OVERLAP}[whatever_raises_the_tokens_nobody_read_are_sampled_again]",),
    ),
    _pipeline(
        name="a step that raises is not forgotten",
        old="        self._unread = None\n        self._scheduler.restart()\n",
        new="        self._scheduler.restart()\n",
        why="Its tokens are read into the plan of another.",
        killers=(f"{_OVERLAP}[whatever_raises_the_tokens_nobody_read_are_sampled_again]",),
    ),
    _scheduler(
        name="blocks are shared before their tokens were read",
        old="                token, end = new[-1], len(known)\n",
        new="                token, end = new[-1], request.num_computed_tokens\n",
        why="A block is published with tokens that may be dropped.",
        killers=(f"{_OVERLAP}[only_what_was_read_is_shared]",),
    ),
)
