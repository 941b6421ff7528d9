"""Kernels beside their peers, in one process: what `weft bench kernels` measures, an operation a file."""
