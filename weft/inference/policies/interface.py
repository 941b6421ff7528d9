"""What a scheduling policy is, and all that it may see. One policy is one file beside this one; none knows a block."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from weft.config import SchedulerConfig
from weft.inference.request import Request


@runtime_checkable
class SchedulerView(Protocol):
    """The requests that have not ended, as they stand when a property is read."""

    @property
    def running(self) -> Sequence[Request]:
        """Those that hold a row and have a token to compute, in the order in which they were admitted.

        Tokens that are sampled and not read yet count: a request that only awaits its last one is not among them.
        """
        ...

    @property
    def waiting(self) -> Sequence[Request]:
        """Those that were preempted, then the others in the order of arrival."""
        ...

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens that a waiting request would find in the prefix cache now."""
        ...


class Policy(ABC):
    """Says in which order requests may take a step's budget; the scheduler says how much each gets.

    The scheduler keeps three promises for every policy, so that none can starve a request by itself: a request that
    finds no room closes the door to all who wait behind it in that step; what is running gives way only when the pool
    is dry; and once somebody had to give way in a step, nobody else is admitted in it.

    A policy is asked while a plan is in the making: the engine refuses to add or end a request, or take a step, then.
    """

    # The fields of SchedulerConfig that only some policies read, and this one does.
    options: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: SchedulerConfig) -> None:  # noqa: B027  # most policies need nothing of it
        """A policy takes from the configuration what concerns it."""

    @abstractmethod
    def candidates(self, view: SchedulerView) -> Iterator[Request]:
        """Requests in the order to be served; one that is not named gets nothing in this step.

        The scheduler serves each before it asks for the next, and asks no further than somebody can be served: what is
        costly should come late, and nothing may rely on being reached.
        """
        ...

    def admitted(self, request: Request) -> None:  # noqa: B027  # most policies have no use for it
        """Told of each request at the moment at which it gets a row, within the step that admits it."""

    def victim(self, running: Sequence[Request]) -> Request:
        """Which of the running requests (two at least) gives its blocks back when the pool is dry.

        Some request must never be chosen while another runs, or none might ever end. By default it is the last one
        admitted that goes, so that the first one stays.
        """
        return running[-1]
