"""Faults of sampling: noise, truncation, processors, seeds, logprobs."""

from functools import partial

from weft.testing.planted.fault import Fault

_NOISE = "tests/unit/inference/test_noise.py"
_SAMPLER = "tests/unit/inference/test_sampler.py"
_PROCESSORS = "tests/unit/inference/test_processors.py"
_LOGPROBS = "tests/unit/inference/test_logprobs.py::test_the_law_holds"
_fault = partial(Fault, tier="tests/unit")
_noise = partial(_fault, file="weft/inference/noise.py")
_sampler = partial(_fault, file="weft/inference/sampler.py")
_processors = partial(_fault, file="weft/inference/processors.py")
_step = partial(_fault, file="weft/inference/step_processing.py")
_row = partial(_fault, file="weft/inference/row_processing.py")
_logprobs = partial(_fault, file="weft/inference/logprobs.py")
_engine = partial(_fault, file="weft/inference/engine.py")

FAULTS = (
    _noise(
        name="half of a seed does not count",
        old="seeds[:, None] >> 32 & _MASK",
        new="seeds[:, None] & _MASK",
        why="Seeds that differ in their upper half draw alike or not at random.",
        killers=(f"{_NOISE}::test_noise_is_the_documented_formula_for_every_64_bit_seed",),
    ),
    _noise(
        name="noise is infinite for one word in 2**24",
        old="((word >> 8).double() + 0.5) * 2.0**-24",
        new="((word >> 8).float() + 0.5) * 2.0**-24",
        why="In float32 the largest number below 1 rounds to 1.",
        killers=(f"{_NOISE}::test_noise_is_finite_for_every_word",),
    ),
    _noise(
        name="a token's noise depends on the width of the batch",
        old="position = positions[:, None].expand_as(tokens)",
        new="position = (positions[:, None] + len(positions)).expand_as(tokens)",
        why="vllm#51226: a seeded request says something else beside others.",
        killers=(f"{_NOISE}::test_noise_depends_on_seed_position_and_token_whatever_the_batch_order_and_width",),
    ),
    _sampler(
        name="logits are divided by the temperature",
        old="logits + rows.temperatures[:, None] * noise, logits)",
        new="logits / rows.temperatures[:, None] + noise, logits)",
        why="vllm#3063: a tiny temperature overflows.",
        killers=(f"{_SAMPLER}::test_tiny_temperatures_are_greedy_and_never_overflow",),
    ),
    _sampler(
        name="noise is not as strong as the temperature",
        old="logits + rows.temperatures[:, None] * noise, logits)",
        new="logits + noise, logits)",
        why="Every temperature is 1.",
        killers=(f"{_SAMPLER}::test_sampled_tokens_follow_the_softmax_over_positions_and_over_seeds",),
    ),
    _sampler(
        name="no temperature is below a tenth",
        old="logits + rows.temperatures[:, None] * noise, logits)",
        new="logits + rows.temperatures.clamp(min=0.1)[:, None] * noise, logits)",
        why="A bound that nobody was told of.",
        killers=(f"{_SAMPLER}::test_tiny_temperatures_are_greedy_and_never_overflow",),
    ),
    _sampler(
        name="a broken row gives a token",
        old="return torch.where(torch.isfinite(highest), logits.argmax(dim=-1), -1)",
        new="return logits.argmax(dim=-1)",
        why="flashinfer#384: an id that means nothing.",
        killers=(f"{_SAMPLER}::test_a_row_that_is_not_finite_gives_minus_one_and_leaves_the_others",),
    ),
    _sampler(
        name="tokens equal to the last that is kept are cut",
        old="logits.masked_fill(logits < cut[:, None], -torch.inf)",
        new="logits.masked_fill(logits <= cut[:, None], -torch.inf)",
        why="flashinfer#3774: which of equals are kept must be one rule.",
        killers=(f"{_SAMPLER}::test_ties_at_the_cut_are_kept",),
    ),
    _row(
        name="min_tokens gives one more",
        old="least_length=admission.num_prompt_tokens + params.min_tokens,",
        new="least_length=admission.num_prompt_tokens + params.min_tokens + 1,",
        why="vllm#46243: a length is compared with a last index.",
        killers=("tests/unit/inference/test_mixed_requests.py::test_min_tokens_gives_so_many_and_the_eos",),
    ),
    _row(
        name="one of several EOS ids is held back",
        old="held_back = sorted(admission.stop_token_ids) if params.min_tokens else []",
        new="held_back = sorted(admission.stop_token_ids)[:1] if params.min_tokens else []",
        why="vllm#15407: a model may have several.",
        killers=(f"{_PROCESSORS}::test_min_tokens_equals_huggingfaces_for_every_eos",),
    ),
    _step(
        name="penalties of the output count the prompt",
        old="window = self._window(rows, [row.processing.prompt_length for row in rows])",
        new="window = self._window(rows, [0 for row in rows])",
        why="vllm-metal#69: presence and frequency are of what was said.",
        killers=(f"{_PROCESSORS}::test_a_prompt_of_one_token_said_thrice_is_penalised_as_reported",),
    ),
    _step(
        name="processors come in another order",
        old="            self._biasing(rows),\n            self._repetition(rows),\n",
        new="            self._repetition(rows),\n            self._biasing(rows),\n",
        why="A bias is penalised too, as in vLLM.",
        killers=(f"{_PROCESSORS}::test_processors_come_in_the_order_that_is_written_down",),
    ),
    _processors(
        name="a negative logit is rewarded for repetition",
        old="torch.where(values > 0, values / penalties, values * penalties)",
        new="values / penalties",
        why="Dividing a negative number makes it larger.",
        killers=(f"{_PROCESSORS}::test_repetition_penalty_equals_huggingfaces_over_prompt_and_output",),
    ),
    _processors(
        name="presence counts how often",
        old="values = values - presence * counts.clamp(max=1)",
        new="values = values - presence * counts",
        why="That is what frequency is for.",
        killers=(f"{_PROCESSORS}::test_penalties_are_what_their_law_says",),
    ),
    _processors(
        name="counts are not cleared",
        old="    sums.scatter_(0, at, 0.0)\n",
        new="",
        why="The next step counts on where this one ended.",
        killers=(f"{_PROCESSORS}::test_what_is_counted_in_is_clear_again_for_the_next_step",),
    ),
    _processors(
        name="a bad word is found where only its end matches",
        old="matches = ((before == beginnings) | (beginnings < 0)).all(dim=-1)",
        new="matches = ((before == beginnings) | (beginnings < 0))[:, -1:].all(dim=-1)",
        why="Words of three tokens are taken for words of two.",
        killers=(f"{_PROCESSORS}::test_a_bad_word_that_begins_with_the_whole_text_is_excluded",),
    ),
    _processors(
        name="allowed tokens lose their logits",
        old="    flat[places] = allowed\n",
        new="    flat[places] = 0.0\n",
        why="They are all as likely.",
        killers=(f"{_PROCESSORS}::test_allowed_token_ids_are_all_but_huggingfaces_suppressed_ones",),
    ),
    _logprobs(
        name="logprobs after temperature",
        file="weft/inference/runner.py",
        tier="tests/equivalence",
        old='if self._logprobs_mode == "raw_logprobs":',
        new='if self._logprobs_mode == "none":',
        why="vllm#9453: what the model says does not depend on how it is sampled.",
        killers=(
            "tests/equivalence/test_logprobs_equal_huggingface.py::test_every_request_is_told_what_huggingface_says[cpu-{}-False]",
        ),
    ),
    _logprobs(
        name="a rank counts from zero",
        old="ranks=better.sum(dim=-1, dtype=torch.int32) + 1,",
        new="ranks=better.sum(dim=-1, dtype=torch.int32),",
        why="The likeliest is first.",
        killers=(_LOGPROBS,),
    ),
    _logprobs(
        name="of equal tokens any may be named",
        old="return size - (keys.topk(count, dim=-1).values & 0xFFFFFFFF).clamp(min=1)",
        new="return logits.topk(count, dim=-1).indices",
        why="Two runs name two lists.",
        killers=(_LOGPROBS,),
    ),
    _logprobs(
        name="the softmax of logprobs is taken in the model's dtype",
        old="torch.log_softmax(logits, dim=-1, dtype=torch.float32)",
        new="torch.log_softmax(logits, dim=-1).float()",
        why="Logprobs of bfloat16 have three digits.",
        killers=(_LOGPROBS,),
    ),
    _engine(
        name="requests without a seed draw alike",
        old="seed = self._seeds.getrandbits(64) if params.seed is None else params.seed",
        new="seed = 0 if params.seed is None else params.seed",
        why="Everybody gets the same answer.",
        killers=(
            "tests/unit/inference/test_engine.py::"
            "test_unseeded_requests_are_reproducible_from_the_engine_seed_and_differ_from_each_other",
        ),
    ),
    _fault(
        name="n answers of one seed are the same",
        file="weft/text_engine.py",
        old="(seed + index) % 2**64",
        new="seed % 2**64",
        why="vllm#10980.",
        killers=("tests/unit/test_text_engine.py::test_each_of_n_answers_is_what_its_seed_says_alone",),
    ),
)
