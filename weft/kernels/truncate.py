"""Where min_p, top_k and top_p cut a row of logits: one number a row, and what is not below it may be drawn.

In this order: min_p leaves logits from `highest + temperature * log(min_p)` on, top_k those from the k-th largest on,
and top_p the fewest of the likeliest of what is left that weigh `top_p` of it. Logits equal to the last that is kept
are kept too. Weights are whole numbers of 2**-40 of the likeliest token's, so their sums, and with them the cut, are
the same in any order, batch or chunking.
"""

from weft.kernels._truncate_reference import reference

__all__ = ["reference"]
