"""Faults of runs elsewhere: each would make a test that did not run, or ran otherwise, look as if it had passed."""

from functools import partial

from weft.testing.planted.fault import Fault

_LEDGER = "tests/unit/testing/test_remote_ledger.py"
_SESSION = "tests/unit/testing/test_remote_session.py"
_ARTEFACTS = "tests/unit/testing/test_remote_artefacts.py"
_ledger = partial(Fault, file="weft/testing/remote/ledger.py", tier="tests/unit")
_session = partial(Fault, file="weft/testing/remote/session.py", tier="tests/unit")
_artefacts = partial(Fault, file="weft/testing/remote/artefacts.py", tier="tests/unit")
_PROGRAM = "tests/unit/testing/test_remote_modal.py"

FAULTS = (
    _ledger(
        name="a test of which nothing came back is forgotten",
        old="        for node_id in lost:\n",
        new="        for node_id in ():\n",
        why="The worker dies, and the run is green.",
        killers=(
            f"{_LEDGER}::test_a_dead_worker_fails_the_test_it_died_in_and_those_that_it_never_began",
            f"{_SESSION}::test_a_dead_worker_fails_every_test_that_it_leaves",
        ),
    ),
    _ledger(
        name="a lost attempt is still heard",
        old="        if event.attempt in self._past:\n            return []\n",
        new="",
        why="Events of two machines are taken for one's.",
        killers=(f"{_LEDGER}::test_of_a_second_attempt_the_first_ones_results_stay_and_its_late_events_do_not_count",),
    ),
    _ledger(
        name="a measurement of two attempts",
        old="            self._spanning |= (self._current.begun & self._measured) - self._done\n",
        new="",
        why="The first half of a speed is of another machine than the second.",
        killers=(f"{_LEDGER}::test_a_measurement_never_spans_two_attempts",),
    ),
    _ledger(
        name="events are taken as they come",
        old="            attempt.early.setdefault(event.number, event)\n",
        new="            attempt.early.setdefault(attempt.next_number, event)\n",
        why="A report that overtakes its start belongs to another test.",
        killers=(f"{_LEDGER}::test_order_and_repetition_on_the_way_change_nothing",),
    ),
    _ledger(
        name="a test without its tear-down has passed",
        old='any(report.get("when") == "teardown" for report in attempt.reports)',
        new="bool(attempt.reports)",
        why="It died there.",
        killers=(f"{_LEDGER}::test_a_test_that_died_in_teardown_has_not_passed",),
    ),
    _ledger(
        name="any exit is a good one",
        old="        if code not in _JUDGED:\n",
        new="        if False:\n",
        why="pytest ended with an internal error after the last test.",
        killers=(f"{_LEDGER}::test_a_run_that_ended_badly_is_a_problem_though_all_its_tests_passed",),
    ),
    Fault(
        name="tuples come back as lists",
        file="weft/testing/remote/events.py",
        tier="tests/unit",
        old='            restored["longrepr"] = tuple(data["longrepr"])\n',
        new='            restored["longrepr"] = data["longrepr"]\n',
        why="Where a test was skipped is unpacked as a tuple: with -v the terminal's reporter fails.",
        killers=(f"{_SESSION}::test_what_ran_elsewhere_is_told_as_if_it_had_run_here",),
    ),
    _session(
        name="snapshots of another machine are left over",
        old='manager.get_plugin("syrupy") if elsewhere else None',
        new="None",
        why="--snapshot-update deletes what only a GPU can write again.",
        killers=(f"{_SESSION}::test_snapshots_of_tests_elsewhere_stay",),
    ),
    _session(
        name="skipped is as good as run",
        old="        if not self._ran and not session.testsfailed:\n",
        new="        if False:\n",
        why="The commonest lie: a green GPU job without a GPU test.",
        killers=(f"{_SESSION}::test_no_gpu_test_selected_or_all_of_them_skipped_is_red",),
    ),
    _session(
        name="measurements share a process",
        old="    return [together, *alone] if together else alone\n",
        new="    return [[*together, *(item for group in alone for item in group)]]\n",
        why="What ran before has warmed caches and filled memory.",
        killers=(f"{_SESSION}::test_what_measures_runs_alone",),
    ),
    Fault(
        name="the run elsewhere selects for itself",
        file="weft/testing/remote/worker.py",
        tier="tests/unit",
        old="missing=[node_id for node_id in self._node_ids if node_id not in found]",
        new="missing=[]",
        why="What is not there looks like a worker that was lost.",
        killers=(f"{_SESSION}::test_a_test_that_is_not_there_fails_and_the_others_run",),
    ),
    _artefacts(
        name="an artefact leaves its folder",
        old="target.resolve().is_relative_to(root.resolve().joinpath(owners[0]))",
        new="True",
        why="A run elsewhere writes over a test here.",
        killers=(f"{_ARTEFACTS}::test_nothing_is_written_outside_of_the_folders",),
    ),
    _artefacts(
        name="an artefact follows a link",
        old="    if not inside or target.is_symlink() or target.is_dir():\n",
        new="    if target.is_dir():\n",
        why="The folder is inside, and what it links to is not.",
        killers=(f"{_ARTEFACTS}::test_links_lead_nowhere",),
    ),
    Fault(
        name="a program that ended well need leave nothing",
        file="weft/testing/remote/program.py",
        tier="tests/unit",
        old="                elif status == 0:\n",
        new="                elif False:\n",
        why="A verdict that was asked for and is not there looks like one that was written.",
        killers=(f"{_PROGRAM}::test_what_a_program_writes_comes_to_its_place_here_whatever_its_status",),
    ),
    Fault(
        name="prompts that stay here are sent for all the same",
        file="main.py",
        tier="tests/unit",
        old="    if not file.resolve().is_relative_to(root) or left_out(root)(file.resolve().relative_to(root)):\n",
        new="    if False:\n",
        why="The machine there would say, after minutes, that there is no such file.",
        killers=("tests/unit/test_main.py::test_prompts_of_the_tree_go_to_modal_and_the_verdict_comes_back",),
    ),
    Fault(
        name="a machine is asked for before the arguments are looked at",
        file="main.py",
        tier="tests/unit",
        old="    gpu = checked_gpu(options.modal)\n    _check(options)\n",
        new="    gpu = checked_gpu(options.modal)\n",
        why="Minutes of a GPU for a dtype that does not exist.",
        killers=("tests/unit/test_main.py::test_what_cannot_be_done_says_so_and_exits_non_zero[arguments4-float128]",),
    ),
)
