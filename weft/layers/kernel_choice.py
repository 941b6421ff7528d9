"""Which kernel multiplies by a matrix at a number of rows. By shapes alone, from measurements on an H200 (docs/log.md).

`one_pass` reads the matrix once with norm, SwiGLU and residual around it; `few_rows` is for a few dozen rows, and may
leave its sum in planes that the next norm adds up; `library` is torch's own product, the fastest of many rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from weft.kernels import gemv
from weft.kernels._few_rows_tiles import MANY_ROWS, MOST_FEW_ROWS, splits_of
from weft.kernels._jit import MODERN

Product = Literal["one_pass", "few_rows", "library"]
Use = Literal["plain", "swiglu", "added"]

PRODUCTS: tuple[Product, ...] = ("one_pass", "few_rows", "library")


@dataclass(frozen=True, kw_only=True)
class ProductShape:
    """What a choice may depend on.

    rows: of x.   outer, inner: of the matrix `[outer, inner]`.   has_bias: whether something is added to the product.
    use: `added` to the residual stream, halves joined by `swiglu`, or `plain`.
    compute_capability: 90 is a Hopper, 0 the interpreter.
    """

    rows: int
    outer: int
    inner: int
    use: Use
    has_bias: bool
    dtype: torch.dtype
    compute_capability: int


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """planes: float32 planes that `few_rows` leaves to the next norm, for a product that is added; else None.

    summed: it leaves their sum, as one plane.
    """

    product: Product
    planes: int | None = None
    summed: bool = False


Choose = Callable[[ProductShape], KernelChoice]

_LIBRARY = KernelChoice(product="library")


def can(product: Product, shape: ProductShape) -> bool:
    """Whether this kernel is able to."""
    if product == "one_pass":
        return gemv.refusal(shape.rows, shape.inner) is None
    if product == "few_rows":
        return not shape.has_bias and shape.inner * shape.dtype.itemsize % 16 == 0
    return True


def choose(shape: ProductShape) -> KernelChoice:
    """The fastest that was measured for such a shape."""
    if shape.dtype == torch.float32:
        return _LIBRARY  # what float32 is for is comparing; the others were not timed in it
    if shape.rows == 1 and can("one_pass", shape):
        return KernelChoice(product="one_pass")
    if shape.rows <= MOST_FEW_ROWS and shape.compute_capability in MODERN and can("few_rows", shape):
        return _few_rows(shape)
    return _LIBRARY


def forced(product: str) -> Choose:
    """A choice for tests: this kernel wherever it is able to, the library elsewhere."""
    (wanted,) = (one for one in PRODUCTS if one == product)

    def always(shape: ProductShape) -> KernelChoice:
        if not can(wanted, shape):
            return _LIBRARY
        return _few_rows(shape) if wanted == "few_rows" else KernelChoice(product=wanted)

    return always


def batch_invariant(shape: ProductShape) -> KernelChoice:
    """One kernel for any number of rows, its sums cut by the matrix alone: a row's bits do not depend on the others.

    Where there are many rows the parts of a sum need no programs of their own; they are added in the same order.
    """
    few = _few_rows(shape)
    # A bias comes to the whole sum, or its bits would show in how many parts there are.
    return replace(few, summed=few.planes is not None and (shape.rows >= MANY_ROWS or shape.has_bias))


def _few_rows(shape: ProductShape) -> KernelChoice:
    planes = splits_of(shape.outer, shape.inner) if shape.use == "added" else None
    return KernelChoice(product="few_rows", planes=planes)
