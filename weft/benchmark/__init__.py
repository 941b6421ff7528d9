"""Measures: experiments over systems, printed as tables beside their targets, and as rows for `results/`."""
