"""How heads lie over programs, as plain numbers: a grid, and the scratch that its programs write, follow from them."""

from typing import Any

import pytest

from weft.kernels._paged_decode_tiles import MOST_SPLITS, SPLIT, Layout, layout_of

LLAMA: dict[str, Any] = {"head_tiles": 8, "head_dim": 128, "room": 32768, "split": SPLIT, "num_warps": 4}


@pytest.mark.parametrize(
    ("given", "sharing", "shares", "owners"),
    [
        ({"batch": 64}, 1, 32, 32),  # fewer are long than there are shares
        ({"batch": 5}, 6, 32, 5),
        ({"batch": 64, "head_dim": 64}, 1, 0, 0),  # merged in registers
        ({"batch": 5, "head_dim": 64}, 6, 0, 5),
        ({"batch": 1}, 32, 0, 1),
        ({"batch": 1, "num_warps": 1}, 64, 0, 1),
        ({"batch": 64, "lend": False}, 1, 0, 0),
        ({"batch": 3, "head_dim": 64, "lend": True}, 10, 32, 3),
        ({"batch": 3, "lend": True, "programs": 1}, 1, 1, 1),
        ({"batch": 3, "lend": True, "programs": 96}, 4, 6, 3),
        ({"batch": 3, "lend": False, "programs": 96}, 4, 0, 3),
        ({"batch": 3, "lend": False, "programs": 10**6}, MOST_SPLITS, 0, 3),
        ({"batch": 0, "lend": True}, 64, 0, 0),
    ],
    ids=str,
)
def test_programs_and_scratch_follow_from_shapes_and_from_what_is_forced(
    given: dict[str, Any], sharing: int, shares: int, owners: int
) -> None:
    layout = layout_of(**{**LLAMA, **given})
    assert layout == Layout(head_tiles=8, num_parts=MOST_SPLITS, sharing=sharing, shares=shares)
    assert layout.num_owners(given["batch"]) == owners
    assert layout.is_whole == (sharing == 1 and not shares)


@pytest.mark.parametrize(
    ("room", "num_parts"), [(0, 1), (1, 1), (SPLIT, 1), (SPLIT + 1, 2), (10**6, MOST_SPLITS)], ids=str
)
def test_a_head_has_as_many_parts_as_its_table_has_room_for_and_a_bound(room: int, num_parts: int) -> None:
    layout = layout_of(**{**LLAMA, "room": room}, batch=1)
    assert layout.num_parts == num_parts
    assert layout.sharing <= num_parts
