"""Faults of the scheduler, its policies and a request's own bookkeeping."""

from functools import partial

from weft.testing.planted.fault import Fault

_LAW = "tests/unit/inference/test_reported_faults.py::test_the_law_holds"
_POLICIES = "tests/unit/inference/test_policies.py"
_MEMORY = "tests/unit/inference/test_policies_with_memory.py"
_INTERRUPTS = (
    "tests/unit/inference/test_interrupts.py::test_an_interrupt_in_coming_or_going_leaves_no_count_and_no_debt_behind"
)
_scheduler = partial(Fault, file="weft/inference/scheduler.py", tier="tests/unit")
_draft = partial(Fault, file="weft/inference/draft.py", tier="tests/unit")
_request = partial(Fault, file="weft/inference/request.py", tier="tests/unit")
_scores = partial(Fault, file="weft/inference/prompt_scores.py", tier="tests/unit")

FAULTS = (
    Fault(
        name="a policy may call the engine while it plans",
        file="weft/inference/pipeline.py",
        old="if self._is_planning or (is_step and self._is_stepping):",
        new="if is_step and self._is_stepping:",
        why="A request ends while it is given a row, and takes the row with it.",
        tier="tests/unit",
        killers=(
            "tests/unit/inference/test_calls_from_inside_a_step.py::"
            "test_a_policy_that_calls_the_engine_is_told_which_call_and_nothing_is_lost"
            "[admitted-finish('a', 'abort')-False-True]",
        ),
    ),
    _scheduler(
        name="the last chunk is taken for one that stops short",
        old="count > min(chunk, left):",
        new="count >= min(chunk, left):",
        why="vllm#7380: a prompt that is a whole number of chunks samples nothing at its end.",
        killers=(f"{_LAW}[chunks_change_nothing]",),
    ),
    _scheduler(
        name="a new block comes one token late",
        old="end > len(request.blocks) * size",
        new="end - 1 > len(request.blocks) * size",
        why="nano-vllm#150: the first token of a block has nowhere to go.",
        killers=(f"{_LAW}[blocks_appear_when_their_first_token_is_written]",),
    ),
    _scheduler(
        name="a prompt cached to its end leaves nothing to compute",
        old="min(len(hits) * size, request.num_tokens - 1)",
        new="len(hits) * size",
        why="nano-vllm#144: a query of no tokens, and no logits to sample from.",
        killers=(f"{_LAW}[a_prompt_cached_to_its_end_still_computes_a_token]",),
    ),
    _scheduler(
        name="the last token of a cached prompt is computed into a block that others read",
        old="is_copied = len(hits) * size == request.num_tokens",
        new="is_copied = False",
        why="A shared block is written to instead of copied first.",
        killers=(f"{_LAW}[a_prompt_cached_to_its_end_still_computes_a_token]",),
    ),
    _scheduler(
        name="an ended request keeps its row",
        old="        self._free_rows.append(_row(request))\n",
        new="",
        why="sglang-jax#982: rows run out one after another.",
        killers=(f"{_LAW}[every_block_goes_back_once]",),
    ),
    _scheduler(
        name="an ended request keeps a block",
        old="self._release(request.blocks)",
        new="self._release(request.blocks[1:])",
        why="A block leaks with every request.",
        killers=(f"{_LAW}[every_block_goes_back_once]",),
    ),
    _scheduler(
        name="a token is appended twice",
        old="known.append(token)",
        new="known += [token, token]",
        why="vllm-gaudi#524: harmless until the request is preempted and brings its tokens again.",
        killers=(f"{_LAW}[the_pool_says_nothing_about_the_output]",),
    ),
    _scheduler(
        name="who comes back brings its prompt only",
        old="tuple(request.token_ids),",
        new="tuple(request.token_ids[: request.num_prompt_tokens]),",
        why="nano-vllm#144: after a preemption what was said already is not computed again.",
        killers=(f"{_LAW}[who_comes_back_computes_prompt_and_output_again]",),
    ),
    _scheduler(
        name="a hit is not owned before room is sought",
        old="        self._allocator.share(hits)  # first, so that what follows cannot evict them\n",
        new="",
        why="What was found is evicted for the blocks that follow it.",
        killers=(f"{_LAW}[the_pool_says_nothing_about_the_output]",),
    ),
    _draft(
        name="a preempted request keeps its blocks in the plan",
        old="for part in (self.admissions, self.new_blocks, self.copies):",
        new="for part in ():",
        why="The plan writes to blocks that have another owner by now.",
        killers=(f"{_LAW}[who_gives_way_leaves_the_step]",),
    ),
    _scheduler(
        name="a block can be found before it is computed",
        old="        self._policy.admitted(request)\n",
        new="        self._publish(request, min(request.num_tokens, len(request.blocks) * size))\n"
        "        self._policy.admitted(request)\n",
        why="vllm#7822: a request of the same step skips work that nobody has done.",
        killers=(f"{_LAW}[what_is_not_computed_yet_is_not_shared]",),
    ),
    _scheduler(
        name="the budget counts requests and not tokens",
        old="            left -= count\n",
        new="            left -= 1\n",
        why="A step computes more tokens than memory was measured for.",
        killers=("tests/unit/inference/test_engine_over_a_toy_model.py::TestToyEngine",),
    ),
    _scheduler(
        name="a late token of an ended request is given out",
        old="            if request.has_ended:\n                continue\n",
        new="",
        why="With overlap a step is under way when a request is aborted.",
        killers=("tests/unit/inference/test_scheduler.py::test_a_late_token_of_a_finished_request_is_dropped",),
    ),
    _scheduler(
        name="an abort of a waiting request leaves its tokens in the queue's count",
        old="            self._num_waiting_tokens -= self._waiting.pop(request_id).num_tokens\n"
        "        return StepOutput(",
        new="            self._waiting.pop(request_id)\n        return StepOutput(",
        why="vllm#53130: a healthy server that lets nobody in.",
        killers=("tests/unit/inference/test_paged_engine.py::test_a_queue_that_is_full_refuses_and_stays_as_it_was",),
    ),
    _scheduler(
        name="who is preempted goes to the end of those who were",
        old="self._preempted = {request.request_id: request, **self._preempted}",
        new="self._preempted = {**self._preempted, request.request_id: request}",
        why="The one admitted last is preempted first, and would come back first.",
        killers=(f"{_POLICIES}::test_fcfs_who_gave_way_comes_back_in_order_before_who_came_later",),
    ),
    _scheduler(
        name="a copy's source stays owned",
        old="            self._release([source])\n",
        new="",
        why="A block leaks whenever a prompt is cached to its end.",
        killers=(f"{_LAW}[a_prompt_cached_to_its_end_still_computes_a_token]",),
    ),
    _scheduler(
        name="an admission that finds no room keeps its hits",
        old="        if blocks is None:\n            self._release(hits)\n            return False\n",
        new="        if blocks is None:\n            return False\n",
        why="Each attempt to come in takes another reference.",
        killers=(f"{_LAW}[the_pool_says_nothing_about_the_output]",),
    ),
    _draft(
        name="tokens found by who was admitted and preempted in one step count as found",
        old="            request.num_cached_tokens = 0  # what was found may be gone when it is admitted again\n",
        new="            pass\n",
        why="A request is told of cached tokens that it has computed.",
        killers=(
            f"{_POLICIES}::test_who_is_admitted_and_gives_way_in_one_step_has_been_served_nothing_from_the_cache",
        ),
    ),
    _scheduler(
        name="salts are not asked for",
        old="return self._prefixes.lookup(request.token_ids, request.cache_salt)",
        new="return self._prefixes.lookup(request.token_ids, None)",
        why="Who says nothing of a salt finds what a salt was to hide, and who has one finds nothing.",
        killers=("tests/unit/inference/test_paged_engine.py::test_salts_share_no_prefix",),
    ),
    _request(
        name="a request ends one token late",
        old="if len(self.token_ids) >= self.max_len:",
        new="if len(self.token_ids) > self.max_len:",
        why="max_tokens gives one token more.",
        killers=("tests/unit/inference/test_request.py::test_stop_rules",),
    ),
    _request(
        name="the length wins over a stop token",
        old='        if token in self.stop_token_ids:\n            return "stop", token\n'
        '        if len(self.token_ids) >= self.max_len:\n            return "length", None\n',
        new='        if len(self.token_ids) >= self.max_len:\n            return "length", None\n'
        '        if token in self.stop_token_ids:\n            return "stop", token\n',
        why="An answer whose last allowed token is the EOS is said to be cut off.",
        killers=("tests/unit/inference/test_request.py::test_stop_rules",),
    ),
    _scores(
        name="a prompt that is computed again is scored again",
        old="                request.num_scored_tokens = end\n",
        new="",
        why="vllm#29071: the logprobs of a prompt are more than its tokens.",
        killers=("tests/unit/inference/test_prompt_scores_faults.py::test_the_law_holds",),
    ),
    Fault(
        name="an interrupted coming leaves its tokens among those that wait",
        file="weft/inference/pipeline.py",
        tier="tests/unit",
        old="            self._scheduler.add(request)\n        except BaseException:\n            self._restart()\n",
        new="            self._scheduler.add(request)\n        except BaseException:\n",
        why="A limit on the tokens that wait is off by as many from then on.",
        killers=(f"{_INTERRUPTS}[add]",),
    ),
    _scheduler(
        name="an interrupted end leaves a prompt to be scored",
        old="        self._prompt_scores = PromptScores()\n        for request in self.waiting:\n"
        "            self._prompt_scores.add(request)\n",
        new="        for request in self._preempted.values():\n            self._prompt_scores.add(request)\n",
        why="It is never given out, and every later step is searched for it.",
        killers=(f"{_INTERRUPTS}[_end]",),
    ),
    Fault(
        name="priorities do not age",
        file="weft/inference/policies/priority.py",
        tier="tests/unit",
        old="return request.priority * self._ageing_s + request.arrival_s",
        new="return request.priority * 1e9 + request.arrival_s",
        why="Who is of little urgency waits for ever.",
        killers=(f"{_POLICIES}::test_priority_two_less_overtakes_for_twice_the_ageing_and_no_longer",),
    ),
    Fault(
        name="deadlines count from nothing",
        file="weft/inference/policies/deadline.py",
        tier="tests/unit",
        old="return request.arrival_s + allowed",
        new="return allowed",
        why="A patient request is overtaken by every later one.",
        killers=(f"{_POLICIES}::test_deadline_counts_from_the_arrival",),
    ),
    Fault(
        name="a preempted request is charged for its prompt again",
        file="weft/inference/policies/fair.py",
        tier="tests/unit",
        old="cost - self._charged.get(request, 0)",
        new="cost",
        why="A user pays for a dry pool, and for every look at what was served.",
        killers=(f"{_MEMORY}::test_fair_a_preempted_request_is_not_charged_twice",),
    ),
    Fault(
        name="nobody counts how often a request was overtaken",
        file="weft/inference/policies/prefix_first.py",
        tier="tests/unit",
        old="            self._overtaken[earlier] += 1\n",
        new="            pass\n",
        why="A prompt that nobody shares starves.",
        killers=(f"{_MEMORY}::test_prefix_first_lets_nobody_wait_for_more_than_so_many_others",),
    ),
    Fault(
        name="a later batch comes in when the first of this one ends",
        file="weft/inference/policies/static.py",
        tier="tests/unit",
        old="if not view.running and not members:",
        new="if len(view.running) < self._max_num_seqs and not members:",
        why="Static batching is the measure for the others, and must not be continuous.",
        killers=(f"{_POLICIES}::test_static_a_later_batch_waits_for_the_last_of_this_one",),
    ),
)
