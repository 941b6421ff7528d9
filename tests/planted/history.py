"""Faults of the watch over many nights: what has shifted is told to nobody, or every night."""

from functools import partial

from weft.testing.planted.fault import Fault

_HISTORY = "tests/unit/benchmark/test_history.py"
_CHANGES = "tests/unit/benchmark/test_changes_command.py"
_MISSED = f"{_HISTORY}::test_whatever_looks_are_missed_the_same_is_told"
_MERGED = f"{_HISTORY}::test_rows_merged_in_from_earlier_nights_are_"
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
        killers=(f"{_CHANGES}::test_a_file_that_is_looked_at_once_tells_all_that_it_holds", _MISSED),
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
        old="sorted(found[case], key=lambda night: (instant(night.date), night.value))",
        new="list(found[case])",
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
        old="range(seen + 1, len(values) + 1)",
        new="range(max(seen + 1, len(values)), len(values) + 1)",
        why="A shift that shows on a night whose look is missed is told late, or never.",
        killers=(_MISSED,),
    ),
    _history(
        name="a look leaves the level of the one before",
        old="nights.index(look.since), nights",
        new="0, nights",
        why="What was told is told again with the next row.",
        killers=(_MISSED, f"{_MERGED}neither_told_again_nor_hide_the_next"),
    ),
    _history(
        name="a shift that is told hides the next",
        old="since=nights[shifts[-1].first]",
        new="since=nights[shifts[-1].shown]",
        why="The nights that showed the one are gone for the other.",
        killers=(f"{_HISTORY}::test_a_shift_soon_after_another_is_not_hidden_by_it",),
    ),
    _history(
        name="a history that begins anew is told nothing of",
        old="    else:\n        look = None\n",
        new="    elif look is not None:\n        return [], look\n",
        why="Rows that were lost silence their case for good.",
        killers=(f"{_HISTORY}::test_another_history_of_the_same_case_is_looked_at_anew",),
    ),
    _history(
        name="what was seen once is not looked at again, whatever is merged in",
        old="nights.index(look.shown) + 1",
        new="len(nights)",
        why="The nights of a machine that was away are told of to nobody.",
        killers=(f"{_HISTORY}::test_rows_merged_in_after_the_last_shift_are_looked_at",),
    ),
    _history(
        name="rows that are merged twice are two nights",
        old='            nights[Night(record["date"], float(record["value"]))] = None\n',
        new='            nights[Night(record["date"], float(record["value"])), len(nights)] = None\n',
        why="Every night weighs as two, and chance seems certain.",
        killers=(f"{_HISTORY}::test_series_are_ratios_by_device_and_case_in_the_order_of_their_dates",),
    ),
    _history(
        name="the middle of the largest numbers is none",
        old="median(map(Fraction, part))",
        new="float(median(part))",
        why="A shift is told as one to infinity, by no number.",
        killers=(f"{_HISTORY}::test_what_is_told_of_the_largest_numbers_is_a_number",),
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
        old=" / abs(Fraction(self.before)) if",
        new=" / Fraction(self.before) if",
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
        old="        file, _reason_against,",
        new="        file, lambda record: None,",
        why="Rows are written over, or a look that never was silences its case.",
        killers=(f"{_CHANGES}::test_a_file_that_holds_no_looks_is_refused_and_left",),
    ),
    Fault(
        name="a line ends wherever a text may",
        file="weft/benchmark/json_lines.py",
        tier="tests/unit",
        old='content.removesuffix(b"\\n").split(b"\\n") if content else ()',
        new="[line.encode() for line in content.decode().splitlines()]",
        why="A note with a separator of Unicode is two lines, and neither is a row.",
        killers=(f"{_CHANGES}::test_a_text_may_hold_what_ends_lines_elsewhere",),
    ),
    Fault(
        name="whatever is broken was cut off",
        file="weft/benchmark/json_lines.py",
        tier="tests/unit",
        old="may_be_torn and _is_torn(line)",
        new="may_be_torn",
        why="A file of anything is one without rows, and nothing has shifted in it.",
        killers=(f"{_CHANGES}::test_a_line_that_is_broken_in_another_way_is_an_error_wherever_it_stands",),
    ),
    Fault(
        name="what was cut off ends the watch",
        file="weft/benchmark/json_lines.py",
        tier="tests/unit",
        old="may_be_torn and _is_torn(line)",
        new="False",
        why="One run that was stopped, and every night is an error until somebody mends the file.",
        killers=(f"{_CHANGES}::test_a_line_that_was_cut_off_is_passed_over_with_a_warning",),
    ),
    _looks(
        name="a file beside the looks is written over",
        old='f"{file.name}.{uuid4().hex}"',
        new='f"{file.name}.new"',
        why="It is somebody's.",
        killers=(f"{_CHANGES}::test_no_file_of_another_name_is_touched",),
    ),
    _changes(
        name="a link is taken for the file of looks",
        old="        return file and file.resolve()\n",
        new="        return file\n",
        why="What it led to is never written again.",
        killers=(f"{_CHANGES}::test_looks_are_written_through_links",),
    ),
    _looks(
        name="looks are written in letters that a file may not hold",
        old="json.dumps(case._asdict() | look._asdict())",
        new="json.dumps(case._asdict() | look._asdict(), ensure_ascii=False)",
        why="A name with half a pair of surrogates ends the watch, and nothing is remembered.",
        killers=(f"{_CHANGES}::test_a_name_that_is_no_text_of_utf_8_is_remembered_all_the_same",),
    ),
)
