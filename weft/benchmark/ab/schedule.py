"""Who runs when: blocks in which every arm runs twice, the second time in the opposite order. Pure.

A machine that grows slower steadily weighs on all arms of a block alike; who comes first changes from block to block.
"""

from enum import StrEnum


class Arm(StrEnum):
    """CONTROL is the base once more, in a process of its own; PLANTED is that process with work added to it."""

    BASE = "base"
    HEAD = "head"
    CONTROL = "control"
    PLANTED = "planted"


def block_order(block: int) -> tuple[Arm, ...]:
    """The turns of the block of this number.

    >>> [str(arm) for arm in block_order(1)]
    ['head', 'control', 'planted', 'base', 'base', 'planted', 'control', 'head']
    """
    arms = list(Arm)
    start = block % len(arms)
    there = (*arms[start:], *arms[:start])
    return (*there, *reversed(there))
