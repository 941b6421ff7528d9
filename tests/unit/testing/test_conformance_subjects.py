"""What is no subject of a suite is an error that says what is; what fails inside of one is told with its place."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.unit.testing.test_conformance_engine import TOY
from tests.unit.testing.test_laws import PROMPTS, ToyEngine, ToyReference
from weft import testing
from weft.config import SchedulerConfig
from weft.errors import ConfigError
from weft.inference.block_allocator import BlockAllocator
from weft.inference.policies.fcfs import FirstComeFirstServed
from weft.models.llama import Llama
from weft.testing.conformance.suite import ConformanceError

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.mark.parametrize(
    ("suite", "subject", "takes"),
    [
        ("policy", FirstComeFirstServed(SchedulerConfig()), "a class of policies"),
        ("policy", "fcfs", "a class of policies"),
        ("allocator", BlockAllocator(4), "a class of allocators, or a function that makes one"),
        ("attention", object(), "an AttentionBackend, or what makes one"),
        ("attention", "paged_gather", "an AttentionBackend, or what makes one"),
        ("model", Llama, "a weft.models.family.Family"),
        ("kernel", abs, "a KernelOp"),
        ("engine", 5, "a factory of engines, or the name of one"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_judged_is_an_error_that_says_what_can(suite: str, subject: object, takes: str) -> None:
    judge: Callable[[Any], object] = getattr(testing, f"run_{suite}_conformance")
    with pytest.raises(ConfigError, match=f"cannot be judged\nhint: the suite takes {takes}"):
        judge(subject)


class Bare:
    """No engine at all."""


class ListsItsLacks(ToyEngine):
    lacks = ["seeds"]  # type: ignore[assignment]  # noqa: RUF012 (the fault)

    def __init__(self) -> None: ...


class Misspells(ToyEngine):
    def __init__(self) -> None:
        self.lacks = {"logit": "it shows none"}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "NoneType is no engine: it has no description, lacks, answer, close\nhint: docs/verify.md"),
        (Bare(), "Bare is no engine"),
        (ListsItsLacks(), "ListsItsLacks.lacks is a list, no mapping\nhint: .*each with the reason"),
        (Misspells(), "names 'logit', which is no ability\nhint: did you mean 'logits'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_engine_is_refused_before_it_is_asked_anything(made: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        testing.run_engine_conformance(
            lambda model, argument: made, model=TOY, prompts=PROMPTS, reference=ToyReference()
        )


def test_what_fails_inside_is_told_with_its_place() -> None:
    class Forgets(FirstComeFirstServed):
        def victim(self, running: Sequence[Any]) -> Any:
            return {}["oldest"]

    with pytest.raises(ConformanceError, match=r"KeyError: 'oldest' \(in victim, test_conformance_subjects\.py:\d+\)"):
        testing.run_policy_conformance(Forgets)
