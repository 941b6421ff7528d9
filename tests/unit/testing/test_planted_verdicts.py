"""What a run of tests says of a planted fault, and which faults are planted: pure decisions."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.planted import CATALOGUE
from weft.errors import ConfigError
from weft.testing.planted.choice import choose, sample
from weft.testing.planted.fault import Catalogue, Fault
from weft.testing.planted.trial import Trial
from weft.testing.planted.verdict import judge

ROOT = Path(__file__).parents[3]


def fault(name: str = "f", *killers: str, expect: str = "killed") -> Fault:
    return Fault(
        name=name,
        file="shop/price.py",
        old="a",
        new="b",
        why="",
        tier="tests",
        killers=killers or ("tests/test_price.py",),
        expect=expect,  # type: ignore[arg-type]
    )


def trial(exit_code: int | None, **what: object) -> Trial:
    sets = {name: frozenset(value) if name != "strayed" else value for name, value in what.items()}  # type: ignore[call-overload]
    return Trial(seconds=1.0, exit_code=exit_code, **sets)


@pytest.mark.parametrize(
    ("expect", "seen", "kind", "is_expected"),
    [
        ("killed", trial(1, failed=["tests/test_price.py::test_sum"]), "killed", True),
        ("killed", trial(0, passed=["tests/test_price.py::test_sum"]), "survived", False),
        ("survives", trial(0, passed=["tests/test_price.py::test_sum"]), "survived", True),
        ("survives", trial(1, failed=["tests/test_price.py::test_sum"]), "killed", False),
        ("killed", trial(1, failed=["tests/test_other.py::test_sum"]), "wrong killer", False),
        ("killed", trial(1, failed=["tests/test_price.py_more::test_sum"]), "wrong killer", False),
        ("killed", trial(None), "timed out", False),
        ("survives", trial(None), "timed out", False),
        ("survives", trial(0), "invalid", False),
        *(("killed", trial(code, failed=["tests/test_price.py::a"]), "invalid", False) for code in (2, 3, 4, 5, -11)),
        ("killed", trial(1, failed=["tests/test_price.py::a"], errors=["tests/test_price.py::b"]), "invalid", False),
        ("killed", trial(1, failed=["tests/test_price.py::a"], errors=["tests/test_price.py::a"]), "killed", True),
        (
            "killed",
            trial(1, failed=["tests/test_price.py::a"], no_program=["tests/test_price.py::a"]),
            "invalid",
            False,
        ),
        ("killed", trial(1, failed=["tests/test_price.py::a"], strayed=("shop",)), "invalid", False),
        ("survives", trial(0, passed=["tests/test_price.py::a"], strayed=("shop",)), "invalid", False),
    ],
)
def test_only_an_ordinary_failure_of_who_was_named_is_a_kill(
    expect: str, seen: Trial, kind: str, is_expected: bool
) -> None:
    verdict = judge(fault(expect=expect), seen)
    assert (verdict.kind, verdict.is_expected) == (kind, is_expected)


def test_each_test_that_was_named_has_to_see_it() -> None:
    both = fault("f", "tests/test_price.py::test_sum[1]", "tests/test_shop.py")
    one = trial(1, failed=["tests/test_price.py::test_sum[1]"])
    assert judge(both, one).kind == "wrong killer"
    assert "tests/test_shop.py" in judge(both, one).detail
    assert judge(both, trial(1, failed=[*one.failed, "tests/test_shop.py::test_a[x]"])).kind == "killed"
    assert judge(both, trial(1, failed=["tests/test_price.py::test_sum[12]", "tests/test_shop.py::a"])).kind != "killed"


def test_a_sample_looks_into_every_part_and_follows_from_its_seed() -> None:
    parts = {part: [fault(f"{part}{place}") for place in range(size)] for part, size in (("a", 40), ("b", 3), ("c", 1))}
    catalogue = Catalogue(parts=parts, sources=("shop",))
    chosen = sample(catalogue, 9, 5)
    assert len(set(chosen)) == 9
    assert Counter(catalogue.part_of(fault) for fault in chosen) == {"a": 5, "b": 3, "c": 1}
    assert chosen == sample(catalogue, 9, 5)
    assert len({sample(catalogue, 9, seed) for seed in range(20)}) > 10
    assert len(sample(catalogue, 100, 5)) == 44
    assert choose(catalogue, "2", 5) == sample(catalogue, 2, 5)
    assert choose(catalogue, "all", 5) == catalogue.faults
    assert choose(catalogue, "b", 5) == tuple(parts["b"])
    assert [fault.name for fault in choose(catalogue, "c0", 5)] == ["c0"]


@pytest.mark.parametrize("asked", ["0", "-3", "--3", "²", "atention", "xyzzy"])
def test_what_cannot_be_planted_is_named(asked: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(asked)) as refusal:
        choose(CATALOGUE, asked, 0)
    assert refusal.value.hint
    assert len(refusal.value.hint) < 250, "a hint is no catalogue"


def test_a_fault_that_is_none_is_refused() -> None:
    fields = {"name": "f", "file": "a", "old": "x", "new": "y", "why": "", "tier": "tests", "killers": ("tests/a",)}
    for wrong in ({"new": "x"}, {"old": ""}, {"killers": ()}, {"killers": ("other/a.py",)}):
        with pytest.raises(ConfigError, match="'f'"):
            Fault(**fields | wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'f'"):
        Catalogue(parts={"one": [fault()], "two": [fault()]}, sources=())


def test_every_fault_of_the_catalogue_stands_once_in_its_file_and_names_tests_that_are_there() -> None:
    for planted in CATALOGUE.faults:
        assert (ROOT / planted.file).read_text(encoding="utf-8").count(planted.old) == 1, planted.name
        for killer in planted.killers:
            file, _, test = killer.partition("::")
            name = re.split(r"\[|::", test)[0]
            assert name in (ROOT / file).read_text(encoding="utf-8"), f"{planted.name}: {killer}"
            assert f"{name}(" in (ROOT / file).read_text(encoding="utf-8") or not name.startswith("test_")


def test_the_catalogue_is_large_and_has_controls() -> None:
    expected = Counter(planted.expect for planted in CATALOGUE.faults)
    assert expected["killed"] >= 100
    assert expected["survives"] >= 2
