"""What goes wrong between requests of different kinds, planted: each fault breaks a law that holds without it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.unit.inference.mixed_bench import Modules, made
from tests.unit.inference.mixed_laws import (
    Kinds,
    a_request_is_scored_by_its_own_logits,
    a_step_truncates_if_somebody_in_it_asks_for_it,
    each_request_draws_by_its_own_seed,
    every_step_samples_what_was_asked_for,
    want_of_blocks_is_not_heard,
    whoever_gives_way_goes_on_as_if_it_had_not,
    whoever_takes_a_row_finds_nothing_of_its_last_owner,
)
from tests.unit.inference.planting import Edit

# Values are compared here; to check annotations too, a hundred thousand of them, would take most of the time.
pytestmark = pytest.mark.usefixtures("as_users_run_it")
Law = Callable[[Modules, Kinds], None]
SOME = ("seed", "repetition", "top_k", "bias", "presence")  # noise, truncation and processors


@dataclass(frozen=True)
class Fault:
    """kinds: those among which the law sees it."""

    report: str
    law: Law
    edits: tuple[Edit, ...]
    kinds: Kinds


def fault(report: str, law: Law, *edits: Edit, kinds: Kinds = SOME) -> Fault:
    return Fault(report, law, edits, kinds)


AGAIN = "commit_step(self._state.tensors, rows, lengths, sampled, self._kept(size), self.token_log)"
SAMPLED = "sampled = program.sample_again(size, processed)"
SIZES = "return StepSize(size, size, truncates)"
FAULTS = [
    fault(
        "what is sampled again is what was sampled first",
        every_step_samples_what_was_asked_for,
        ("runner", SAMPLED, "sampled = program.sample_again(size, logits)"),
    ),
    fault(
        "what is sampled again is told to nobody",
        every_step_samples_what_was_asked_for,
        ("runner", SAMPLED, "sampled = program._sampler(processed, program.sampling(size))"),
    ),
    fault(
        "the next step goes on from what was sampled first",
        every_step_samples_what_was_asked_for,
        ("step_program", AGAIN, AGAIN.replace("self._kept(size)", "torch.zeros_like(self._keeps)")),
    ),
    fault(
        "the host reads what was sampled first",
        every_step_samples_what_was_asked_for,
        ("step_program", AGAIN, AGAIN.replace("token_log", "token_log.clone()")),
    ),
    fault(
        "a prompt beside it goes on with what was sampled again",
        every_step_samples_what_was_asked_for,
        ("step_program", AGAIN, AGAIN.replace("self._kept(size)", "self._all_kept")),
    ),
    fault(
        "a step that is sampled again is computed again",
        every_step_samples_what_was_asked_for,
        ("step_program", AGAIN, AGAIN.replace("lengths, sampled", "lengths - 1, sampled")),
    ),
    fault(
        "it is sampled again with the noise of another place",
        every_step_samples_what_was_asked_for,
        ("step_program", "sampling(rows, self.lengths(size),", "sampling(rows, self.lengths(size) + 1,"),
    ),
    fault(
        "it is sampled again without noise",
        every_step_samples_what_was_asked_for,
        ("step_program", "any_noise=True, truncates", "any_noise=False, truncates"),
    ),
    fault(
        "it is sampled again without truncation",
        every_step_samples_what_was_asked_for,
        ("step_program", "any_noise=True, truncates=size.truncates", "any_noise=True, truncates=False"),
    ),
    fault(
        "a program's rows are processed as if only those were there that speak",
        every_step_samples_what_was_asked_for,
        ("runner", "program.lengths(size), row_each=True", "program.lengths(size), row_each=False"),
        kinds=("bias", "allowed"),
    ),
    fault(
        "a program's rows are processed without the last token",
        every_step_samples_what_was_asked_for,
        ("runner", "program.lengths(size), row_each=True", "program.lengths(size) - 1, row_each=True"),
        kinds=("held back", "presence"),
    ),
    fault(
        "a program's rows are scored as if only those were there that speak",
        a_request_is_scored_by_its_own_logits,
        ("runner", "logits_of=scored, row_each=True", "logits_of=scored, row_each=False"),
    ),
    fault(
        "a program is scored by what it was processed to",
        a_request_is_scored_by_its_own_logits,
        ("runner", "self._scored(logits, processed, program", "self._scored(processed, processed, program"),
    ),
    fault(
        "a program is scored by what it was before",
        a_request_is_scored_by_its_own_logits,
        ("runner", "self._scored(logits, processed, program", "self._scored(logits, logits, program"),
    ),
    fault(
        "logits that are still to be scored are processed in place",
        a_request_is_scored_by_its_own_logits,
        ("runner", "in_place = self._observe is None and not self._logprobs.wants(plan)", "in_place = True"),
    ),
    fault(
        "scores are those of the token that was sampled first",
        a_request_is_scored_by_its_own_logits,
        ("runner", SAMPLED, f"{SAMPLED}\n            sampled = logits.argmax(dim=-1)"),
    ),
    fault(
        "a decode is replayed without truncation",
        a_step_truncates_if_somebody_in_it_asks_for_it,
        ("step_sizes", SIZES, "return StepSize(size, size)"),
    ),
    fault(
        "every decode is replayed with truncation",
        a_step_truncates_if_somebody_in_it_asks_for_it,
        ("step_sizes", SIZES, "return StepSize(size, size, True)"),
    ),
    fault(
        "a graph with truncation stands for the one without",
        a_step_truncates_if_somebody_in_it_asks_for_it,
        ("step_sizes", "import dataclass\n", "import dataclass, field\n"),
        ("step_sizes", "    truncates: bool = False\n", "    truncates: bool = field(default=False, compare=False)\n"),
    ),
    fault(
        "a graph without truncation stands for the one with it",
        a_step_truncates_if_somebody_in_it_asks_for_it,
        ("step_sizes", "import dataclass\n", "import dataclass, field\n"),
        ("step_sizes", "    truncates: bool = False\n", "    truncates: bool = field(default=False, compare=False)\n"),
        ("step_sizes", "for truncates in (False, True)", "for truncates in (True, False)"),
    ),
    fault(
        "a step that computes prompts does not truncate",
        every_step_samples_what_was_asked_for,
        ("step_sizes", "_rounded(num_tokens), count, truncates=True)", "_rounded(num_tokens), count)"),
    ),
    fault(
        "a program is not told that somebody is truncated",
        every_step_samples_what_was_asked_for,
        ("runner", "truncates = self._state.truncates(plan)", "truncates = False"),
    ),
    fault(
        "a row once truncated is taken for truncated ever after",
        a_step_truncates_if_somebody_in_it_asks_for_it,
        ("device_state", "(rows_of.add if belongs else rows_of.discard)(", "(rows_of.add if belongs else id)("),
    ),
    fault(
        "who takes part counts as truncated without noise",
        a_step_truncates_if_somebody_in_it_asks_for_it,
        ("device_state", "params.temperature > 0 and (params.top_k", "(params.top_k"),
    ),
    *(
        fault(
            f"{kind} is no truncation",
            a_step_truncates_if_somebody_in_it_asks_for_it,
            ("device_state", condition, "False"),
            kinds=(kind,),
        )
        for kind, condition in (
            ("top_k", "params.top_k > 0"),
            ("top_p", "params.top_p < 1"),
            ("min_p", "params.min_p > 0"),
        )
    ),
    fault(
        "a request of no kind keeps what its row was asked for",
        whoever_takes_a_row_finds_nothing_of_its_last_owner,
        ("processing", "self._running.pop(admission.row, None)", "pass"),
    ),
    fault(
        "processors that were joined serve whoever has the rows",
        whoever_takes_a_row_finds_nothing_of_its_last_owner,
        ("processing", "            self._joined = None\n", ""),
    ),
    fault(
        "who comes back is looked at as if it were at its beginning",
        want_of_blocks_is_not_heard,
        ("processing", "_Running(processing, admission.num_computed_tokens)", "_Running(processing, 0)"),
    ),
    fault(
        "a chunk counts as one token",
        every_step_samples_what_was_asked_for,
        ("processing", "self._running[row].num_tokens += count", "self._running[row].num_tokens += 1"),
    ),
    fault(
        "what was said before it gave way is part of the prompt",
        whoever_gives_way_goes_on_as_if_it_had_not,
        ("row_processing", "prompt_length=admission.num_prompt_tokens", "prompt_length=len(admission.token_ids)"),
        kinds=("frequency", "presence"),
    ),
    fault(
        "min_tokens begins anew when it comes back",
        whoever_gives_way_goes_on_as_if_it_had_not,
        (
            "row_processing",
            "least_length=admission.num_prompt_tokens + params",
            "least_length=len(admission.token_ids) + params",
        ),
        kinds=("held back",),
    ),
    *(
        fault(
            f"{kind}: a row keeps its last owner's",
            whoever_takes_a_row_finds_nothing_of_its_last_owner,
            ("processing", "import dataclass\n", "import dataclass, replace\n"),
            (
                "processing",
                "            if processing is not None:\n",
                "            last = self._running.get(admission.row)\n"
                "            if processing is not None and last is not None:\n"
                f"                kept = {{name: getattr(last.processing, name) for name in {names}}}\n"
                "                processing = replace(processing, **kept)\n"
                "            if processing is not None:\n",
            ),
            kinds=("words" if kind == "allowed" else "allowed", kind),
        )
        for kind, names in (
            ("allowed", ("allowed",)),
            ("words", ("words",)),
            ("held back", ("held_back", "least_length")),
            ("bias", ("biased", "biases")),
            ("repetition", ("repetition",)),
            ("frequency", ("frequency",)),
            ("presence", ("presence",)),
        )
    ),
    *(
        fault(
            f"{kind}: who comes back has lost it",
            whoever_gives_way_goes_on_as_if_it_had_not,
            ("row_processing", "        params = admission.params\n", "        params = kept_of(admission)\n"),
            (
                "row_processing",
                "@dataclass(frozen=True, kw_only=True, eq=False)\n",
                "def kept_of(admission: Admission):\n"
                "    from dataclasses import replace\n"
                "    if len(admission.token_ids) == admission.num_prompt_tokens:\n"
                "        return admission.params\n"
                f"    return replace(admission.params, {without})\n\n\n"
                "@dataclass(frozen=True, kw_only=True, eq=False)\n",
            ),
            kinds=(kind,),
        )
        for kind, without in (
            ("allowed", "allowed_token_ids=None"),
            ("words", "bad_words=()"),
            ("held back", "min_tokens=0"),
            ("bias", "logit_bias=None"),
            ("repetition", "repetition_penalty=1.0"),
            ("frequency", "frequency_penalty=0.0"),
            ("presence", "presence_penalty=0.0"),
        )
    ),
    *(
        fault(
            f"{name}: a row keeps its last owner's",
            whoever_takes_a_row_finds_nothing_of_its_last_owner,
            ("device_state", f"            self.{name}[rows] = {value}\n", ""),
            kinds=(kind, "words"),
        )
        for kind, name, value in (
            ("seed", "seeds", "seeds"),
            ("top_k", "top_k", "top_k"),
            ("temperature", "temperatures", "temperatures.view(torch.float64).float()"),
            ("top_p", "top_p", "top_p.view(torch.float64).float()"),
            ("min_p", "min_p", "min_p.view(torch.float64).float()"),
        )
    ),
    fault(
        "who comes back draws by another seed",
        whoever_gives_way_goes_on_as_if_it_had_not,
        ("scheduler", "seed=request.seed,", "seed=request.seed + request.num_tokens - request.num_prompt_tokens,"),
    ),
    fault(
        "who brings no seed draws by the engine's own",
        each_request_draws_by_its_own_seed,
        (
            "engine",
            "self._seeds.getrandbits(64) if params.seed is None",
            "Random(0).getrandbits(64) if params.seed is None",
        ),
    ),
    fault(
        "who comes in together draws alike",
        each_request_draws_by_its_own_seed,
        ("device_state", "_signed(admission.seed) for admission", "_signed(admissions[0].seed) for admission"),
    ),
    fault(
        "a seed's highest bit is lost",
        each_request_draws_by_its_own_seed,
        ("device_state", "return seed - 2**64 if seed >= 2**63 else seed", "return seed % 2**63"),
    ),
    fault(
        "all rows draw by the first one's seed",
        each_request_draws_by_its_own_seed,
        ("sampler", "gumbel(rows.seeds,", "gumbel(rows.seeds[:1].expand_as(rows.seeds),"),
    ),
    fault(
        "a program's rows draw by each other's seeds",
        each_request_draws_by_its_own_seed,
        ("step_program", "seeds=step.seeds,", "seeds=step.seeds.flip(0),"),
    ),
]
LAWS = sorted({fault.law.__name__: fault.law for fault in FAULTS}.items())


@pytest.mark.parametrize(("name", "law"), LAWS, ids=[name for name, _ in LAWS])
def test_the_law_holds(name: str, law: Law) -> None:
    with made() as modules:
        for kinds in {tuple(fault.kinds) for fault in FAULTS if fault.law is law}:
            law(modules, kinds)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.report)
def test_the_law_fails_with_the_fault(fault: Fault) -> None:
    with made(*fault.edits) as modules, pytest.raises((AssertionError, IndexError, RuntimeError)):
        fault.law(modules, fault.kinds)
