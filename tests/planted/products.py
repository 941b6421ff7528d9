"""Faults of products and of what stands around them: sums of planes, norms, gates."""

from functools import partial

from weft.testing.planted.fault import Fault

_TILES = "tests/kernels/test_invariant_products.py"
_SUM_OF_PLANES = f"{_TILES}::test_add_norm_makes_the_same_of_planes_and_of_their_sum[5]"
_CHOICE = f"{_TILES}::test_few_rows_take_tiles_by_how_much_a_program_reads"
_kernel = partial(Fault, tier="tests/kernels")
_products = partial(_kernel, file="weft/kernels/few_rows_gemm.py")
_tiles = partial(_kernel, file="weft/kernels/_few_rows_tiles.py")

FAULTS = (
    _tiles(
        name="a faster tile cuts other parts",
        old="    if part_of(inner, planes, FEWEST.block_k) == part:  # or they would be other parts\n",
        new="    if True:\n",
        why="Up to 32 rows would have other bits than more of them.",
        killers=(_CHOICE,),
    ),
    _tiles(
        name="a second tile of rows reads all weights again",
        old="    if count > MOST_FEW_ROWS:\n",
        new="    if count >= MANY_ROWS:\n",
        why="At 80 requests 8b's gate took twice as long as the library takes.",
        killers=(_CHOICE,),
    ),
    _tiles(
        name="planes follow from the tile",
        old="step = max(_PART, block_k)",
        new="step = block_k",
        why="Another tile, chosen for another number of rows, sums other columns first.",
        killers=(
            f"{_TILES}::test_planes_are_cut_by_the_matrix_alone",
            f"{_TILES}::test_no_tile_changes_a_bit_and_a_sum_is_that_of_its_planes[{{tile}}-150]".format(
                tile="Tile(block_n=64, block_k=128, num_warps=4, num_stages=4, block_t=None)"
            ),
        ),
    ),
    _products(
        name="a program that sums planes sums them as one",
        old="acc=plane_sums, input_precision=PRECISION)\n            sums += plane_sums",
        new="acc=plane_sums, input_precision=PRECISION)\n            sums = plane_sums",
        why="Only the last part is left.",
        killers=(_SUM_OF_PLANES,),
    ),
    _products(
        name="tiles that go together leave the last group out",
        old="height = tl.minimum(rows - group * GROUP, GROUP)",
        new="height = GROUP",
        why="A group of fewer tiles is dealt out as a full one.",
        killers=(f"{_TILES}::test_tiles_of_programs_that_go_together_cover_every_tile_once",),
    ),
    _kernel(
        name="gate and up change places",
        file="weft/kernels/silu_multiply.py",
        old="result = (silu(gate) * up)",
        new="result = (silu(up) * gate)",
        why="Two halves of one row.",
        killers=(
            "tests/kernels/test_silu_multiply.py::test_products_lie_within_their_roundings[1.0-3-1536-torch.float32]",
        ),
    ),
    _kernel(
        name="the norm is that of the sum before it is rounded",
        file="weft/kernels/add_norm.py",
        old="    x = rounded.to(tl.float32)\n",
        new="",
        why="The stream and its norm part by half a unit.",
        killers=("tests/kernels/test_add_norm.py::test_the_norm_is_that_of_the_sum_as_it_is_kept",),
    ),
    _kernel(
        name="the last plane of a split product is left out",
        file="weft/kernels/add_norm.py",
        old="tl.static_range(1, PLANES)",
        new="tl.static_range(1, PLANES - 1)",
        why="A part of the inside is not summed.",
        killers=(
            "tests/kernels/test_add_norm.py::test_sum_and_norm_lie_within_their_roundings[3-576-3-torch.float32]",
        ),
    ),
    _kernel(
        name="a product of few rows forgets the rest of the inside",
        file="weft/kernels/few_rows_gemm.py",
        old="range(plane * part, tl.minimum(plane * part + part, inner), BLOCK_K)",
        new="range(plane * part, tl.minimum(plane * part + part, inner) - BLOCK_K + 1, BLOCK_K)",
        why="Columns after the last whole tile do not count.",
        killers=(
            "tests/kernels/test_few_rows_gemm.py::test_products_and_sums_of_planes_lie_within_their_roundings[5-200-70-None-torch.float32]",
        ),
    ),
)
