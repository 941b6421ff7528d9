"""Faults of the harness itself: the comparison is the product."""

from functools import partial

from weft.testing.planted.fault import Fault

_EXACT = "tests/unit/testing/test_exactness.py"
_TIES = "tests/unit/testing/test_near_ties.py"
_VERIFY = "tests/unit/testing/test_verify.py"
_PLANTED = "tests/unit/testing/test_planted_verdicts.py"
_CONFORMANCE = "tests/unit/testing/test_conformance"
_POLICY = f"{_CONFORMANCE}_policy.py::test_a_faulty_one_is_convicted_by_its_law"
_ALLOCATOR = f"{_CONFORMANCE}_allocator.py::test_a_faulty_one_is_convicted_by_its_law_and_the_calls_are_shown"
_ATTENTION = f"{_CONFORMANCE}_attention.py::test_a_faulty_one_is_convicted_by_its_law_and_the_input_is_shown"
_MODEL = f"{_CONFORMANCE}_model.py::test_a_faulty_one_is_convicted_by_its_law_and_the_config_is_shown"
_KERNEL = f"{_CONFORMANCE}_kernel.py::test_a_faulty_one_is_convicted_by_its_law_and_the_case_is_shown"
_exact = partial(Fault, file="weft/testing/exactness.py", tier="tests/unit")
_ties = partial(Fault, file="weft/testing/near_ties.py", tier="tests/unit")
_verify = partial(Fault, file="weft/testing/verify.py", tier="tests/unit")
_toy = partial(Fault, file="weft/testing/toy.py", tier="tests/unit")
_verdict = partial(Fault, file="weft/testing/planted/verdict.py", tier="tests/unit")
_RUNS = "tests/unit/testing/test_planted_runs.py"
_ENDED = f"{_RUNS}::test_a_run_that_is_ended_leaves_no_copies_and_no_test_at_work"
_TABLES = "tests/unit/test_benchmark_tables.py"
_LEFT_OUT = f"{_TABLES}::test_a_table_is_left_out_of_every_other_run"
_ALONE = f"{_TABLES}::test_it_measures_in_one_process_and_is_silent_otherwise"
_WAITS = "tests/unit/test_chat_terminal.py::test_what_is_taken_for_a_program_that_waits"
_hook = partial(Fault, file="conftest.py", tier="tests/unit")
_terminal = partial(Fault, file="tests/unit/test_chat_terminal.py", tier="tests/unit")

FAULTS = (
    _exact(
        name="a tolerance a hundred times too wide",
        old="LOGIT_TOLERANCE = 1e-3",
        new="LOGIT_TOLERANCE = 1e-1",
        why="An epsilon ten times too small passes.",
        killers=(f"{_EXACT}::test_logits_are_compared_though_no_token_differs",),
    ),
    _exact(
        name="NaN is within any tolerance",
        old="if not largest <= tolerance:  # a NaN",
        new="if largest > tolerance:  # a NaN",
        why="A comparison with NaN is false, whichever way it is put.",
        killers=(f"{_EXACT}::test_logits_are_compared_though_no_token_differs",),
    ),
    _exact(
        name="a shorter answer is equal",
        old="    if place is None and len(left) != len(right):\n        return min(len(left), len(right))\n",
        new="",
        why="vLLM's own comparison, by zip.",
        killers=(f"{_EXACT}::test_an_answer_that_ends_early_is_never_a_tie",),
    ),
    _exact(
        name="every difference is a tie",
        old="if margin < 2 * measured:",
        new="if margin >= 0:",
        why="The harness acquits whoever comes.",
        killers=(f"{_EXACT}::test_a_difference_is_a_tie_only_under_twice_the_reference_noise",),
    ),
    _exact(
        name="how an answer ended is not compared",
        old="    if finish_reason is not None and finish_reason != reference.finish_reason:\n",
        new="    if False:\n",
        why="Length instead of stop is a fault that users see.",
        killers=("tests/unit/testing/test_exactness.py::test_tokens_are_judged_without_logits",),
    ),
    _exact(
        name="as many ties as positions",
        old="return 1 + num_positions // POSITIONS_PER_TIE",
        new="return 1 + num_positions",
        why="Ties are excuses, and few are due.",
        killers=(f"{_EXACT}::test_the_cap_on_ties_grows_by_one_in_a_hundred_thousand_positions",),
    ),
    _ties(
        name="the engine's own error is its tolerance",
        old="noise=pair_noise(base, again),",
        new="noise=pair_noise(base, judged),",
        why="A theorem: it excuses every flip.",
        killers=(f"{_TIES}::test_the_engines_own_error_is_never_its_tolerance",),
    ),
    _ties(
        name="a logit that is not finite is judged like any other",
        old="broken=~judged.isfinite().all(dim=-1),",
        new="broken=torch.zeros_like(best, dtype=torch.bool),",
        why="NaN beside the best token shows in nothing else.",
        killers=(f"{_TIES}::test_a_logit_that_is_not_finite_fails_even_where_the_best_token_agrees",),
    ),
    _ties(
        name="the divergence is not looked at",
        old="return few and self.mean_kl <= KL_FACTOR * max(self.own_mean_kl, KL_FLOOR)",
        new="return few",
        why="A drift that flips nothing passes.",
        killers=(f"{_TIES}::test_a_drift_that_flips_nothing_fails_by_its_divergence",),
    ),
    _ties(
        name="any number of flips is excused",
        old="few = self.num_unexcused == 0 and self.num_flips <= self.max_flips",
        new="few = self.num_unexcused == 0",
        why="Each lies within noise, and together they do not.",
        killers=(f"{_TIES}::test_many_flips_fail_though_each_lies_within_noise",),
    ),
    _verify(
        name="no prompts pass",
        old="return bool(self.comparisons) and all_judged and",
        new="return all_judged and",
        why="A run that judged nothing is green.",
        killers=(f"{_VERIFY}::test_no_prompts_are_no_pass",),
    ),
    _verify(
        name="a narrow dtype is judged by its audit alone",
        old="return self.audit.passed and self.num_equal == len(self.comparisons)",
        new="return self.audit.passed",
        why="How answers end is not in the audit.",
        killers=(f"{_VERIFY}::test_an_audit_that_passes_excuses_no_answer_that_ends_otherwise",),
    ),
    _toy(
        name="the toy model does not look at what it reads",
        old='            assert found == expected, f"row {row} reads another\'s value at position {position}"\n',
        new="",
        why="It is what sees aliasing.",
        killers=("tests/unit/inference/test_reported_faults.py::test_the_law_fails_with_the_fault",),
    ),
    _verdict(
        name="whatever ends a run of tests is a kill",
        old="    if trial.exit_code != 1:\n",
        new="    if trial.exit_code < 0:\n",
        why="A mutant that is no program would count as seen.",
        killers=(f"{_PLANTED}::test_only_an_ordinary_failure_of_who_was_named_is_a_kill",),
    ),
    _verdict(
        name="any test that fails is the one that was named",
        old="blind = [killer for killer in fault.killers if not sees(killer, trial.failed)]",
        new="blind = [killer for killer in fault.killers if not trial.failed]",
        why="A fault has to be seen by the tests that are there for it.",
        killers=(f"{_PLANTED}::test_only_an_ordinary_failure_of_who_was_named_is_a_kill",),
    ),
    _verdict(
        name="the original may be tested in place of the copy",
        old="    if trial.strayed:\n",
        new="    if False:\n",
        why="An editable install is found first, and every fault survives or is killed by chance.",
        killers=(f"{_PLANTED}::test_only_an_ordinary_failure_of_who_was_named_is_a_kill",),
    ),
    Fault(
        name="a stale fault is planted somewhere",
        file="weft/testing/planted/tree.py",
        tier="tests/unit",
        old="    if count != 1:\n",
        new="    if count < 1:\n",
        why="Where a text occurs twice, nobody knows what was planted.",
        killers=("tests/unit/testing/test_planted_runs.py::test_every_verdict_is_given",),
    ),
    Fault(
        name="a suite in which nothing could be judged passes",
        file="weft/testing/conformance/suite.py",
        tier="tests/unit",
        old="    if report.laws(Outcome.BROKEN) or not report.laws(Outcome.HOLDS):\n",
        new="    if report.laws(Outcome.BROKEN):\n",
        why="Who refuses everything is acquitted of everything.",
        killers=(f"{_CONFORMANCE}_kernel.py::test_bfloat16_alone_is_not_judged_on_a_cpu_and_that_is_no_acquittal",),
    ),
    Fault(
        name="a broken law of a suite is passed over",
        file="weft/testing/conformance/suite.py",
        tier="tests/unit",
        old="    if report.laws(Outcome.BROKEN) or not report.laws(Outcome.HOLDS):\n",
        new="    if not report.laws(Outcome.HOLDS):\n",
        why="Some law always holds.",
        killers=(f"{_POLICY}[nobody waits for ever]",),
    ),
    Fault(
        name="a suite does not look at who is told of evictions",
        file="weft/testing/conformance/allocator_machine.py",
        tier="tests/unit",
        old="_hold(EVICTION, self.evicted == expected,",
        new="_hold(EVICTION, True,",
        why="nano-vllm#163: nobody is told that a cached block is somebody else's now.",
        killers=(f"{_ALLOCATOR}[free blocks go first, then the cached ones in the order of their release]",),
    ),
    Fault(
        name="a suite lets a policy change requests",
        file="weft/testing/conformance/policy_worlds.py",
        tier="tests/unit",
        old="                if old != new:\n",
        new="                if False:\n",
        why="A priority that one policy writes is read by all.",
        killers=(f"{_POLICY}[requests are left as they are]",),
    ),
    Fault(
        name="a suite's window is not looked at from above",
        file="weft/testing/conformance/attention.py",
        tier="tests/unit",
        old="assert found == seen, f",
        new="assert set(seen) <= set(found), f",
        why="transformers#39408: one key too many is seen by nobody.",
        killers=(f"{_ATTENTION}[a window counts the query itself however the tokens come]",),
    ),
    Fault(
        name="a suite leaves the epsilon of norms alone",
        file="weft/testing/conformance/model.py",
        tier="tests/unit",
        old='    "epsilon": {"rms_norm_eps": 1e-2},\n',
        new="",
        why="An epsilon that is not read flips no token.",
        killers=(f"{_MODEL}[epsilon]",),
    ),
    Fault(
        name="a suite's guard bands are not looked at",
        file="weft/testing/conformance/guards.py",
        tier="tests/unit",
        old="            assert (band == _SENTINEL).all(), f",
        new="            assert band.numel(), f",
        why="A kernel that writes one value too far corrupts whatever lies there.",
        killers=(f"{_KERNEL}[nothing is written beside a tensor-writes_one_further]",),
    ),
    Fault(
        name="a run that is ended leaves its copies",
        file="weft/testing/planted/runner.py",
        tier="tests/unit",
        old="    with endings_raise(), _scratch() as folder:\n",
        new="    with _scratch() as folder:\n",
        why="A job that is cut short fills the disk with trees.",
        killers=(_ENDED,),
    ),
    Fault(
        name="copies are removed until a signal comes",
        file="weft/testing/planted/runner.py",
        tier="tests/unit",
        old="        with undisturbed():\n            folder.cleanup()\n",
        new="        folder.cleanup()\n",
        why="Who presses Ctrl-C twice keeps the trees.",
        killers=(f"{_RUNS}::test_copies_are_removed_whatever_signal_comes_meanwhile",),
    ),
    Fault(
        name="tests outlive the run that is ended",
        file="weft/testing/planted/stem.py",
        tier="tests/unit",
        old="    signal.signal(signal.SIGTERM, leave)\n",
        new="",
        why="They go on for minutes, in a folder that is gone.",
        killers=(_ENDED,),
    ),
    _hook(
        name="tables are made in every run",
        old="        items[:] = [item for item in items if item not in tables]\n",
        new="        pass\n",
        why="Figures that no gate reads cost every run their time.",
        killers=(_LEFT_OUT,),
    ),
    _hook(
        name="a run of tables has none",
        old='    if getattr(config.option, "benchmark_only", False):\n',
        new="    if False:\n",
        why="Zero tests run, and all of them passed.",
        killers=(_LEFT_OUT,),
    ),
    _hook(
        name="what is left out is not counted",
        old="        config.hook.pytest_deselected(items=tables)\n",
        new="",
        why="Tests that nobody ran are missing without a word.",
        killers=(_LEFT_OUT,),
    ),
    _hook(
        name="tables are measured by many processes at once",
        old='    elif hasattr(config.option, "dist"):\n',
        new='    elif not hasattr(config.option, "dist"):\n',
        why="Each is slowed down by its neighbours, and shown as the others' time.",
        killers=(_ALONE,),
    ),
    _hook(
        name="pytest-benchmark speaks up in every run",
        old="        config.option.benchmark_skip = True\n",
        new="        pass\n",
        why="Beside xdist it warns, and warnings are errors here.",
        killers=(_ALONE,),
    ),
    _terminal(
        name="a program that runs is taken to wait",
        old='.split()[0] == "S"\n',
        new='.split()[0] in "RS"\n',
        why="CPython loses a Ctrl-C between a prompt and the wait for its line: the test fails now and then.",
        killers=(_WAITS,),
    ),
    _terminal(
        name="a state is read out of a name",
        old='stat.rpartition(")")[2]',
        new='stat.partition(")")[2]',
        why="A program may be called anything, parentheses included.",
        killers=(_WAITS,),
    ),
)
