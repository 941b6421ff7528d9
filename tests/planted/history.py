"""Faults of the watch over many nights: what has shifted is told to nobody, or every night."""

from functools import partial

from weft.testing.planted.fault import Fault

_HISTORY = "tests/unit/benchmark/test_history.py"
_CHANGES = "tests/unit/benchmark/test_changes_command.py"
_MISSED = f"{_HISTORY}::test_whatever_looks_are_missed_the_same_is_told"
_ZERO = f"{_HISTORY}::test_a_wild_night_is_one_night_though_it_be_0[0.0]"
_UNLIKE = f"{_HISTORY}::test_rows_of_unlike_measurements_are_not_mixed"
_history = partial(Fault, file="weft/benchmark/history.py", tier="tests/unit")
_changes = partial(Fault, file="weft/benchmark/changes_command.py", tier="tests/unit")
_looks = partial(Fault, file="weft/benchmark/looks.py", tier="tests/unit")

FAULTS = (
    _history(
        name="a shift is told every night for a month",
        old="            since = shift.first\n",
        new="",
        why="Nobody reads what says the same every day.",
        killers=(f"{_HISTORY}::test_a_shift_is_told_once_and_another_one_later_anew",),
    ),
    _history(
        name="any difference of nights is a shift",
        old="    if statistics[cut] <= _critical(len(last)):\n        return None\n",
        new="",
        why="Noise has a largest cut too.",
        killers=(f"{_HISTORY}::test_nothing_is_told_of_noise_of_wild_nights_or_of_too_few",),
    ),
    _history(
        name="values decide and not their ranks",
        old="_statistics(_ranks(last)[None])",
        new="_statistics(last[None])",
        why="One wild night weighs more than all the others, and the bound is that of ranks.",
        killers=(f"{_HISTORY}::test_a_shift_is_told_with_both_sides_and_how_long_it_has_lasted",),
    ),
    _history(
        name="a bound that shuffled nights pass one time in twenty",
        old="ERRORS = 0.0005",
        new="ERRORS = 0.05",
        why="Every look is another chance to be wrong.",
        killers=(f"{_HISTORY}::test_rows_of_the_simulation",),
    ),
    _history(
        name="nights are taken as they stand in the file",
        old="    keyed.sort(key=itemgetter(0, 1))\n",
        new="    keyed.sort(key=itemgetter(0))\n",
        why="Rows of several machines are joined in any order.",
        killers=(f"{_HISTORY}::test_series_are_ratios_by_device_and_case_in_the_order_of_their_dates",),
    ),
    _history(
        name="seconds are held against those of another day",
        old='_UNITS = ("x", "%")',
        new='_UNITS = ("x", "%", "s")',
        why="A machine that is slow this month is somebody's regression.",
        killers=(f"{_HISTORY}::test_series_are_ratios_by_device_and_case_in_the_order_of_their_dates",),
    ),
    _history(
        name="all nights that ever were are looked at",
        old="WINDOW = 30  #",
        new="WINDOW = 3000  #",
        why="What was slow half a year ago weighs on what is told of today.",
        killers=(f"{_HISTORY}::test_a_shift_is_told_once_and_another_one_later_anew",),
    ),
    _history(
        name="of rows that come at once the last is looked at",
        old="range(look.rows + 1, len(values) + 1)",
        new="range(max(look.rows + 1, len(values)), len(values) + 1)",
        why="A shift that shows on a night whose look is missed is told late, or never.",
        killers=(_MISSED,),
    ),
    _history(
        name="a look leaves the level of the one before",
        old="        look = UNSEEN\n    shifts, since = [], look.since\n",
        new="        look = UNSEEN\n    shifts, since = [], 0\n",
        why="What was told is told again with the next row.",
        killers=(_MISSED,),
    ),
    _history(
        name="a shift that is told hides the next",
        old="            since = shift.first\n",
        new="            since = shift.shown\n",
        why="The nights that showed the one are gone for the other.",
        killers=(f"{_HISTORY}::test_a_shift_soon_after_another_is_not_hidden_by_it",),
    ),
    _history(
        name="a file that begins anew is told nothing of",
        old="        look = UNSEEN\n",
        new="        return [], look\n",
        why="Rows that were lost silence their case until there are as many again.",
        killers=(f"{_HISTORY}::test_fewer_rows_than_were_seen_are_other_rows",),
    ),
    _history(
        name="a value of 0 silences its case",
        old="    if len(last) < 2 * LASTING:\n",
        new="    if len(last) < 2 * LASTING or not (last > 0).all():\n",
        why="For a month nothing is seen, whatever shifts.",
        killers=(_ZERO, f"{_HISTORY}::test_from_0_to_anything_is_a_shift_and_between_zeros_is_none"),
    ),
    _history(
        name="what is less than nothing falls when it rises",
        old=" / abs(self.before):+.1%}",
        new=" / self.before:+.1%}",
        why="A loss that halves is told as a loss.",
        killers=(f"{_HISTORY}::test_from_0_to_anything_is_a_shift_and_between_zeros_is_none",),
    ),
    _history(
        name="rows of two models are one history",
        old="    model: str\n",
        new="",
        why="Whichever was measured last has shifted.",
        killers=(f"{_UNLIKE}[model]",),
    ),
    _history(
        name="rows of two dtypes are one history",
        old="    dtype: str\n",
        new="",
        why="Whichever was measured last has shifted.",
        killers=(f"{_UNLIKE}[dtype]",),
    ),
    _changes(
        name="looks are not kept",
        old="        write_looks(looks, file)\n",
        new="        pass\n",
        why="Every night tells all that ever was.",
        killers=(
            f"{_CHANGES}::test_a_shift_is_told_at_the_first_look_at_which_it_shows_and_not_again",
            f"{_CHANGES}::test_a_case_that_gets_no_more_rows_is_not_told_again_beside_one_that_does",
        ),
    ),
    _changes(
        name="looks are kept before anything is told",
        old=' nights at most", flush=True)\n',
        new=' nights at most")\n',
        why="What a full disk or a broken pipe swallowed is told to nobody.",
        killers=(f"{_CHANGES}::test_what_could_not_be_told_is_told_at_the_next_look",),
    ),
    _looks(
        name="any file is one of looks",
        old="    return type(rows) is type(since) is int and 0 <= since <= rows\n",
        new="    return True\n",
        why="Rows are written over, or a look that never was silences its case.",
        killers=(f"{_CHANGES}::test_a_file_that_holds_no_looks_is_refused_and_left",),
    ),
    Fault(
        name="a line ends wherever a text may",
        file="weft/benchmark/json_lines.py",
        tier="tests/unit",
        old='text.removesuffix("\\n").split("\\n") if text else ()',
        new="text.splitlines()",
        why="A note with a separator of Unicode is two lines, and neither is a row.",
        killers=(f"{_CHANGES}::test_a_text_may_hold_what_ends_lines_elsewhere",),
    ),
    _looks(
        name="looks are written in letters that a file may not hold",
        old="json.dumps(case._asdict() | look._asdict())",
        new="json.dumps(case._asdict() | look._asdict(), ensure_ascii=False)",
        why="A name with half a pair of surrogates ends the watch, and nothing is remembered.",
        killers=(f"{_CHANGES}::test_a_name_that_is_no_text_of_utf_8_is_remembered_all_the_same",),
    ),
)
