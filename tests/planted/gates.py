"""Faults of what holds speed, and of what collects it: each would let a slowdown or a lost row pass unseen."""

from functools import partial

from weft.testing.planted.fault import Fault

_AB = "tests/unit/benchmark/ab"
_VERDICT = f"{_AB}/test_verdict.py"
_CONTROLS = f"{_VERDICT}::test_where_a_control_fails_nothing_is_said_of_the_head"
_WORKER = f"{_AB}/test_worker.py"
_CANNOT = f"{_WORKER}::test_a_worker_that_cannot_measure_says_why"
_SHARES = "tests/unit/benchmark/test_share_rows.py"
_SNAPSHOTS = "tests/unit/testing/test_snapshots.py"
_COUNTS = "tests/perf/test_trace_counts.py::test_what_a_trace_costs"
_ROW = "tests/unit/benchmark/test_row.py"
_COLLECTION = "tests/unit/benchmark/test_collection.py"
_REMOTE = "tests/unit/benchmark/test_remote_collection.py"
_ENGINE = "tests/unit/benchmark/test_engine_options.py"
_verdict = partial(Fault, file="weft/benchmark/ab/verdict.py", tier="tests/unit")
_comparison = partial(Fault, file="weft/benchmark/ab/comparison.py", tier="tests/unit")
_worker = partial(Fault, file="weft/benchmark/ab/worker.py", tier="tests/unit")
_snapshots = partial(Fault, file="weft/testing/snapshots.py", tier="tests/unit")
_row = partial(Fault, file="weft/benchmark/row.py", tier="tests/unit")
_collection = partial(Fault, file="weft/benchmark/collection.py", tier="tests/unit")
_remote = partial(Fault, file="weft/benchmark/remote_collection.py", tier="tests/unit")

GATES = (
    _verdict(
        name="the estimate decides and not its bound",
        old="    elif head.low > threshold:\n",
        new="    elif head.estimate > threshold:\n",
        why="Noise is called slower.",
        killers=(f"{_VERDICT}::test_bounds_decide_and_not_the_estimate",),
    ),
    _verdict(
        name="a control that is faster than its own commit is fine",
        old="    if control.low > threshold or control.high < -threshold:\n",
        new="    if control.low > threshold:\n",
        why="The same machine would hide a slowdown of as much.",
        killers=(f"{_CONTROLS}[control faster]",),
    ),
    _verdict(
        name="planted work may show as anything",
        old="    if not PLANTED / 2 < planted.estimate < 2 * PLANTED:\n",
        new="    if not 0 < planted.estimate:\n",
        why="Who measures a tenth as a third measures something else.",
        killers=(f"{_CONTROLS}[too much shows]",),
    ),
    _verdict(
        name="each of many measures may err as often as one",
        old="    level = 1 - ERRORS / len(measures)\n",
        new="    level = 1 - ERRORS\n",
        why="Ten measures raise ten times the false alarms.",
        killers=(f"{_VERDICT}::test_of_several_measures_the_heaviest_counts_and_each_may_err_less",),
    ),
    Fault(
        name="one wild block moves the estimate",
        file="weft/benchmark/ab/interval.py",
        tier="tests/unit",
        old="estimate=exp(np.median(ratios)) - 1",
        new="estimate=exp(np.mean(ratios)) - 1",
        why="A machine that does something else for a second decides.",
        killers=(f"{_VERDICT}::test_the_slowdown_is_paired_robust_and_the_same_each_time",),
    ),
    _comparison(
        name="the first turns of a worker count",
        old="        for _ in range(_WARM_UP):\n",
        new="        for _ in range(0):\n",
        why="Memory that is reserved once is somebody's slowdown.",
        killers=(f"{_VERDICT}::test_the_first_turns_of_a_worker_warm_it_up",),
    ),
    _comparison(
        name="unlike work is compared without a word",
        old="        equal=digests[Arm.HEAD] == digests[Arm.BASE],\n",
        new="        equal=True,\n",
        why="Who computes less is faster.",
        killers=(f"{_VERDICT}::test_unlike_work_is_told",),
    ),
    _worker(
        name="a worker may measure another tree",
        old="(worker.place is None or not Path(worker.place).is_relative_to(tree.resolve()))",
        new="worker.place is None",
        why="An installed weft is found first, and both commits are the same.",
        killers=(f"{_CANNOT}[another tree]",),
    ),
    _worker(
        name="a worker finds what lies beside its program",
        old='[sys.executable, "-P", str(_PROGRAM)',
        new="[sys.executable, str(_PROGRAM)",
        why="A file of the tree that compares is taken for the tree's that is compared.",
        killers=(f"{_CANNOT}[beside the program]",),
    ),
    _worker(
        name="sets are in another order in every process",
        old=', "PYTHONHASHSEED": "0"}',
        new="}",
        why="Equal work looks unlike.",
        killers=(f"{_WORKER}::test_two_processes_compute_the_same_where_sets_are_shown",),
    ),
    Fault(
        name="planted work is waited out once for all parts",
        file="weft/benchmark/ab/worker_program.py",
        tier="tests/unit",
        old="        while perf_counter() - start < elapsed * (1 + planted):\n",
        new="        while not seconds and perf_counter() - start < elapsed * (1 + planted):\n",
        why="The instrument is proven for one of its measures.",
        killers=(f"{_WORKER}::test_planted_work_is_waited_out_in_every_part",),
    ),
    Fault(
        name="a share is of what the device is sold for",
        file="weft/benchmark/shares.py",
        tier="tests/unit",
        old='record["calibration"]["copy_gb_per_s"]',
        new="4000.0",
        why="A slow day looks like a slow step.",
        killers=(f"{_SHARES}::test_a_slow_day_moves_nothing_and_a_slower_step_does",),
    ),
    Fault(
        name="a prompt's attention is no work",
        file="weft/benchmark/prefill_steps.py",
        tier="tests/unit",
        old="    return 2 * matrices * length + attention + 2",
        new="    return 2 * matrices * length + 2",
        why="Of long prompts a share is too small, and one that halves attention shows as half.",
        killers=(f"{_SHARES}::test_a_share_of_products_is_operations_over_time_over_their_rate",),
    ),
    Fault(
        name="prompts that gave no token were measured",
        file="weft/benchmark/prefill_steps.py",
        tier="tests/unit",
        old="        assert given == prompts, f",
        new="        assert given >= 0, f",
        why="An engine that refuses its prompts is the fastest.",
        killers=("tests/unit/benchmark/test_prefill.py::test_a_prompt_without_a_token_is_no_measurement",),
    ),
    _snapshots(
        name="far too good is good",
        old="<= new <= old * (1 + tolerance):",
        new="<= new:",
        why="A benchmark that measures nothing is the fastest.",
        killers=(f"{_SHARES}::test_far_too_good_fails_as_well",),
    ),
    _snapshots(
        name="a tolerance may be widened in passing",
        old='    same = ("metric", "case", "tolerance")\n',
        new='    same = ("metric", "case")\n',
        why="A check that is loosened is a decision.",
        killers=(f"{_SHARES}::test_another_row_is_no_match[a looser tolerance]",),
    ),
    _snapshots(
        name="one device's counts are every device's",
        old="        return device_key()\n",
        new="        return _ANY\n",
        why="A GPU chooses its kernels.",
        killers=(f"{_SNAPSHOTS}::test_a_count_is_held_exactly_and_an_update_leaves_other_devices_alone",),
    ),
    _snapshots(
        name="a cost that is new is none",
        old="    for name in sorted({*stored, *found}):\n",
        new="    for name in sorted(stored):\n",
        why="A kernel that nobody launched before shows nowhere.",
        killers=(f"{_SNAPSHOTS}::test_a_cost_that_is_gone_or_new_is_a_difference",),
    ),
    Fault(
        name="tokens computed twice are not counted",
        file="weft/testing/step_counts.py",
        tier="tests/perf",
        old="            self.recomputed_tokens += max(min(most, end) - start, 0)\n",
        new="",
        why="A preemption of the wrong request leaves every answer right.",
        killers=(f"{_COUNTS}[preemption]",),
    ),
    Fault(
        name="half of each chunk is left for later",
        file="weft/inference/scheduler.py",
        tier="tests/perf",
        old=" count = min(chunk, left)\n",
        new=" count = (min(chunk, left) + 1) // 2\n",
        why="Every answer is right, and takes twice the steps.",
        killers=(f"{_COUNTS}[chunked_prefill]",),
    ),
)

COLLECTION = (
    _row(
        name="a row is lost behind a line that nobody ended",
        old='("\\n" if _is_torn(path) else "") + line',
        new="line",
        why="Who is stopped while he writes takes the next one's row with his own.",
        killers=(f"{_ROW}::test_a_row_is_not_lost_behind_a_line_that_somebody_was_kept_from_ending",),
    ),
    _row(
        name="every row begins a line of its own",
        old='        return file.read(1) != b"\\n"\n',
        new="        return True\n",
        why="A line between two rows is none, and the file no history.",
        killers=(
            f"{_ROW}::test_a_line_has_the_fields_of_the_schema_in_order",
            f"{_ROW}::test_a_row_is_not_lost_behind_a_line_that_somebody_was_kept_from_ending",
        ),
    ),
    _collection(
        name="a collection in which one failed ends well",
        old="    return 1 if failed or not measured else 0\n",
        new="    return 0 if measured else 1\n",
        why="Nobody reads the lines of a green night.",
        killers=(f"{_COLLECTION}::test_one_that_fails_takes_no_rows_away_and_the_next_is_measured",),
    ),
    _collection(
        name="a collection that measured nothing ends well",
        old="    return 1 if failed or not measured else 0\n",
        new="    return 1 if failed else 0\n",
        why="A machine without a GPU collects what it cannot.",
        killers=(f"{_COLLECTION}::test_what_cannot_run_here_is_skipped_with_a_reason",),
    ),
    _collection(
        name="rows of another day are this run's",
        old="        num_rows = _num_lines(file) - before\n",
        new="        num_rows = _num_lines(file)\n",
        why="An experiment that left nothing counts as measured.",
        killers=(f"{_COLLECTION}::test_one_that_leaves_no_row_has_failed",),
    ),
    _collection(
        name="what an experiment sets for a machine is not passed on",
        old='["bench", name, *arguments, f"--json',
        new='["bench", name, f"--json',
        why="A GPU's rows are of settings made for a CPU.",
        killers=(f"{_COLLECTION}::test_settings_and_file_reach_the_command_line",),
    ),
    _remote(
        name="rows of an experiment that failed elsewhere are dropped",
        old="                num_rows = self._keep(Path(scratch) / there)\n",
        new="                num_rows = 0 if status else self._keep(Path(scratch) / there)\n",
        why="Hours of a GPU are lost with its last minute.",
        killers=(f"{_REMOTE}::test_what_was_measured_before_it_failed_comes_back",),
    ),
    _remote(
        name="rows that come back replace those of their device",
        old="            append_line(record, target)\n",
        new="            target.unlink(missing_ok=True)\n            append_line(record, target)\n",
        why="The history of a device is its last row.",
        killers=(f"{_REMOTE}::test_rows_are_added_to_those_of_their_device",),
    ),
    _remote(
        name="rows from elsewhere name no commit",
        old='            if record["commit"] is None:\n',
        new="            if False:\n",
        why="Nobody knows what was measured.",
        killers=(f"{_REMOTE}::test_rows_are_added_to_those_of_their_device",),
    ),
    Fault(
        name="files of a lost attempt are taken over",
        file="weft/testing/remote/program.py",
        tier="tests/unit",
        old="            attempt, code, artefacts = event.attempt, None, {}\n",
        new="            attempt, code = event.attempt, None\n",
        why="A measurement spans two machines.",
        killers=("tests/unit/testing/test_remote_modal.py::test_files_of_a_lost_attempt_are_not_taken_over",),
    ),
    Fault(
        name="an engine that cannot be is told when it is built",
        file="weft/benchmark/suite_run.py",
        tier="tests/unit",
        old="            WeftSystem.check(self._model, self._room, self._engine)\n",
        new="            pass\n",
        why="Of hours of suites the last shape's rows say that there are none.",
        killers=(f"{_ENGINE}::test_an_engine_that_cannot_be_is_an_error_before_anything_is_done",),
    ),
    Fault(
        name="what failed ends well",
        file="weft/benchmark/command.py",
        tier="tests/unit",
        old="    return 0 if is_whole else 1\n",
        new="    return 0\n",
        why="Whoever waits for the status takes rows that say why there are no figures for figures.",
        killers=(
            "tests/unit/benchmark/test_experiments.py::test_the_status_says_whether_all_that_was_begun_was_measured",
        ),
    ),
    Fault(
        name="an engine with options stands in rows as the one without",
        file="weft/benchmark/suite_run.py",
        tier="tests/unit",
        old="options = self._settings.engine if name == SUBJECT else {}",
        new="options = {}",
        why="Its figures take the place, and the history, of the engine as it comes.",
        killers=(
            "tests/unit/benchmark/test_suites.py::test_fields_of_the_engine_reach_it_and_make_another_system_of_it",
        ),
    ),
)
