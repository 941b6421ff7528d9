"""A list of equal layers that keeps their type."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar, cast

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


class Stack(nn.ModuleList, Generic[Layer]):
    """`nn.ModuleList` whose iteration yields the layer's own type, so that a model's loop is checked."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__(layers)

    def __iter__(self) -> Iterator[Layer]:
        return cast("Iterator[Layer]", super().__iter__())
