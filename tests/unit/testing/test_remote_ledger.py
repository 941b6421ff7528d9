"""What may be believed of a run elsewhere: order, loss, attempts. No process is started."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import RemoteError
from weft.testing.remote.events import Event, read_event
from weft.testing.remote.ledger import Ledger

TESTS = ("test_a.py::test_one", "test_a.py::test_two", "test_a.py::test_three")
SPEED = "test_a.py::test_two"


def told(attempt: str, tests: tuple[str, ...] = TESTS, *, failed: tuple[str, ...] = (), code: int = 0) -> list[Event]:
    """All that a run says of these tests."""

    def events() -> Iterator[tuple[str, dict[str, object]]]:
        yield "begin", {"environment": {"gpu": attempt}}
        yield "collected", {"missing": [test for test in TESTS if test not in tests]}
        for test in tests:
            yield "start", {"nodeid": test}
            for when in ("setup", "call", "teardown"):
                outcome = "failed" if when == "call" and test in failed else "passed"
                yield "report", {"report": {"nodeid": test, "when": when, "outcome": outcome}}
            yield "finish", {"nodeid": test}
        yield "artefact", {"path": f"baselines/{attempt}.json", "content": ""}
        yield "exit", {"code": code or int(bool(failed)), "tail": "the end"}

    return [
        Event(attempt=attempt, number=number, kind=kind, content=content)
        for number, (kind, content) in enumerate(events())
    ]


def heard(ledger: Ledger, events: list[Event]) -> list[str]:
    return [result.node_id for event in events for result in ledger.hear(event)]


def until(events: list[Event], kind: str, test: str) -> list[Event]:
    place = next(i for i, event in enumerate(events) if event.kind == kind and event.content.get("nodeid") == test)
    return events[: place + 1]


def test_a_run_that_says_all_is_believed() -> None:
    ledger = Ledger(TESTS)
    assert heard(ledger, told("A", failed=TESTS[:1])) == [*TESTS]
    assert ledger.close() == {}
    assert ledger.problems == []
    assert ledger.environment == {"gpu": "A"}
    assert set(ledger.artefacts()) == {"baselines/A.json"}


@given(events=st.permutations(told("A")), repeated=st.lists(st.sampled_from(told("A"))))
def test_order_and_repetition_on_the_way_change_nothing(events: list[Event], repeated: list[Event]) -> None:
    ledger = Ledger(TESTS, {SPEED})
    assert sorted(heard(ledger, [*events, *repeated])) == sorted(TESTS)
    assert (ledger.close(), ledger.problems) == ({}, [])


@given(gone=st.integers(0, len(told("A")) - 1))
def test_an_event_that_never_came_is_a_failure_of_all_that_it_leaves_in_doubt(gone: int) -> None:
    events = told("A")
    ledger = Ledger(TESTS)
    done = heard(ledger, events[:gone] + events[gone + 1 :])
    lost = ledger.close()
    assert [*done, *lost] == [*TESTS]
    assert ledger.artefacts() == {} or events[gone].kind != "exit"
    assert lost == {} or gone == len(events) - 1 or all("never came" in reason for reason in lost.values())


def test_without_its_exit_a_run_brings_nothing_back_and_no_measurement() -> None:
    ledger = Ledger(TESTS, {SPEED})
    assert heard(ledger, told("A")[:-1]) == [TESTS[0], TESTS[2]]
    assert ledger.artefacts() == {}
    (reason,) = ledger.close().values()
    assert "the worker was lost in this test: the stream of its events has ended" in reason


def test_a_dead_worker_fails_the_test_it_died_in_and_those_that_it_never_began() -> None:
    ledger = Ledger(TESTS)
    events = until(told("A"), "start", TESTS[1])
    death = Event(attempt="A", number=len(events), kind="exit", content={"code": -11, "tail": "illegal access"})
    assert heard(ledger, [*events, death]) == [TESTS[0]]
    lost = ledger.close()
    assert "lost in this test: the process elsewhere was ended by SIGSEGV" in lost[TESTS[1]]
    assert "illegal access" in lost[TESTS[1]]
    assert "lost before this test" in lost[TESTS[2]]
    assert ledger.problems == ["the process elsewhere was ended by SIGSEGV"]


def test_a_test_that_died_in_teardown_has_not_passed() -> None:
    ledger = Ledger(TESTS)
    events = [event for event in told("A") if event.content.get("report", {}).get("when") != "teardown"]
    events = [Event(attempt="A", number=place, kind=e.kind, content=e.content) for place, e in enumerate(events)]
    assert heard(ledger, events) == []
    assert set(ledger.close()) == set(TESTS)


def test_what_is_collected_here_alone_fails() -> None:
    ledger = Ledger(TESTS)
    assert heard(ledger, told("A", TESTS[:2])) == [*TESTS[:2]]
    assert ledger.close() == {TESTS[2]: "collected here, and not elsewhere: the trees or what they depend on differ"}


def test_silence_is_a_failure_of_all() -> None:
    assert set(Ledger(TESTS).close("no route")) == set(TESTS)


def test_of_a_second_attempt_the_first_ones_results_stay_and_its_late_events_do_not_count() -> None:
    first, second = told("A", failed=TESTS), told("B")
    ledger = Ledger(TESTS)
    assert heard(ledger, until(first, "finish", TESTS[0])) == [TESTS[0]]
    assert heard(ledger, second[:3]) == []
    assert heard(ledger, first) == []
    assert heard(ledger, second[3:]) == [TESTS[1], TESTS[2]]
    assert (ledger.close(), ledger.problems) == ({}, [])
    assert set(ledger.artefacts()) == {"baselines/B.json"}


@pytest.mark.parametrize("kind", ["start", "finish"])
def test_a_measurement_never_spans_two_attempts(kind: str) -> None:
    ledger = Ledger(TESTS, {SPEED})
    heard(ledger, until(told("A"), kind, SPEED))
    assert heard(ledger, told("B")) == [TESTS[2]]
    (lost,) = ledger.close().items()
    assert lost == (SPEED, "begun in an attempt that was lost; a measurement never spans two, run it again")
    assert ledger.artefacts() == {}, "its baseline would be of the attempt that nobody judged"


def test_a_measurement_that_was_not_begun_is_the_next_attempts() -> None:
    ledger = Ledger(TESTS, {SPEED})
    heard(ledger, until(told("A"), "finish", TESTS[0]))
    assert sorted(heard(ledger, told("B"))) == sorted(TESTS[1:])
    assert ledger.close() == {}


@pytest.mark.parametrize("code", [2, 3, 4, 137, -9])
def test_a_run_that_ended_badly_is_a_problem_though_all_its_tests_passed(code: int) -> None:
    ledger = Ledger(TESTS)
    heard(ledger, told("A", code=code))
    assert ledger.close() == {}
    assert len(ledger.problems) == 1
    assert ledger.artefacts() == {}


def test_a_run_that_failed_without_a_failed_test_is_a_problem() -> None:
    ledger = Ledger(TESTS)
    heard(ledger, told("A", code=1))
    ledger.close()
    assert ledger.problems == ["pytest elsewhere ended with status 1, and no test of it has failed"]


def test_reports_of_tests_that_were_not_sent_or_do_not_run_are_problems() -> None:
    ledger = Ledger(TESTS[:1])
    assert heard(ledger, told("A")) == [TESTS[0]]
    assert len(ledger.problems) == 2
    stray = Event(attempt="A", number=0, kind="report", content={"report": {"nodeid": TESTS[0], "when": "call"}})
    ledger = Ledger(TESTS)
    assert ledger.hear(stray) == []
    assert "came while None ran" in ledger.problems[0]


@pytest.mark.parametrize(
    "line",
    [
        *("", "{", "3", "[]", "CUDA error", '{"attempt": "A", "number": 0, "kind": "start"}'),
        '{"attempt": "A", "number": 0, "kind": "boast", "content": {}}',
        '{"attempt": "A", "number": true, "kind": "start", "content": {}}',
        '{"attempt": "A", "number": 0, "kind": "start", "content": []}',
    ],
)
def test_a_line_that_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(RemoteError, match="no event"):
        read_event(line)


def test_events_survive_the_line() -> None:
    assert [read_event(event.to_line()) for event in told("A")] == told("A")
