"""Stop strings across pieces of any size, against a matcher that looks at the whole text after every character."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.stop_strings import StopStrings

_STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)
_TEXT = st.text("ab", max_size=16)


def naive(text: str, stops: list[str], gate: int = 0) -> tuple[str, str | None]:
    """Text before the match and the match: first to complete after `gate` characters, then longest."""
    for end in range(gate + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


def split(text: str, cuts: set[int]) -> list[str]:
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def run(stops: list[str], pieces: list[str], *, gated: int = 0, include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include=include)
    shown = "".join(matcher.push(piece, may_stop=place >= gated) for place, piece in enumerate(pieces))
    return shown + matcher.finish() + matcher.finish(), matcher.match  # what was held back comes once


@given(stops=_STOPS, text=_TEXT, cuts=st.sets(st.integers(1, 15)), gated=st.integers(0, 3), include=st.booleans())
@example(stops=["aab"], text="aaab", cuts=set(), gated=0, include=False)  # a beginning that fails, and one within it
def test_any_text_in_any_pieces_ends_where_the_whole_text_does(
    stops: list[str], text: str, cuts: set[int], gated: int, include: bool
) -> None:
    pieces = split(text, cuts)
    expected, match = naive(text, stops, gate=len("".join(pieces[:gated])))
    if include and match is not None:
        expected += match
    assert run(stops, pieces, gated=gated, include=include) == (expected, match)


@given(stops=_STOPS, text=_TEXT, gated=st.booleans())
def test_held_back_is_what_could_still_become_a_match_and_no_more(stops: list[str], text: str, gated: bool) -> None:
    matcher, shown = StopStrings(stops), ""
    for place, character in enumerate(text, start=1):
        shown += matcher.push(character, may_stop=not gated)
        if matcher.match is not None:
            break
        open_ends = [size for stop in stops for size in range(1, len(stop)) if text[:place].endswith(stop[:size])]
        assert shown == text[: place - max(open_ends, default=0)]


@pytest.mark.parametrize("pieces", [split("ABCDEFGHIJ", {3, 6, 7, 9}), list("ABCDEFGHIJ"), ["ABCDEFGHIJ"]])
def test_no_part_of_a_stop_string_is_shown_before_it_completes(pieces: list[str]) -> None:
    matcher = StopStrings(["DEFGHIJ"])
    shown = [matcher.push(piece) for piece in pieces]
    assert "".join(shown) == "ABC"
    assert (matcher.match, matcher.finish()) == ("DEFGHIJ", "")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["bc", "abcd"], "abcd", ("a", "bc")),  # completes first, though it began later
        (["bc", "abc"], "abcd", ("", "abc")),  # both complete at once: the longest
        (["abc", "bc"], "abcd", ("", "abc")),
        (["aab"], "aaab", ("a", "aab")),
        (["x", "x"], "ax", ("a", "x")),
        (["ab"], "aaaa", ("aaaa", None)),
    ],
)
def test_the_first_to_complete_wins_then_the_longest(
    stops: list[str], text: str, expected: tuple[str, str | None]
) -> None:
    assert run(stops, list(text)) == expected


def test_nothing_comes_after_a_match() -> None:
    matcher = StopStrings(["b"], include=True)
    assert [matcher.push(piece) for piece in ("ab", "c", "b")] == ["ab", "", ""]
    assert (matcher.finish(), matcher.match) == ("", "b")


def test_a_match_where_none_may_be_is_text_and_can_begin_one_that_may() -> None:
    matcher = StopStrings(["ab", "abab"])
    assert matcher.push("ab", may_stop=False) == ""  # still the beginning of the other
    assert matcher.push("a") == ""
    assert (matcher.push("b"), matcher.match) == ("", "abab")
    matcher = StopStrings(["ab"])
    assert (matcher.push("ab", may_stop=False), matcher.match) == ("ab", None)


def test_matchers_share_no_state() -> None:
    first, second = StopStrings(["ab"]), StopStrings(["ab"])
    assert (first.push("a"), second.push("b"), first.push("b")) == ("", "b", "")
    assert (first.match, second.match) == ("ab", None)


def test_a_long_stop_string_over_a_text_that_nearly_matches_is_no_trap() -> None:
    """A search from every place would take 10**9 comparisons here."""
    matcher = StopStrings(["a" * 20_000 + "b"])
    shown = "".join(matcher.push("a" * 100) for _ in range(1000))
    assert len(shown) == 80_000
    assert matcher.push("b") == ""
    assert matcher.match is not None
