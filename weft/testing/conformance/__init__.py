"""Suites for authors: a backend, a policy, an allocator, a family, a kernel or an engine before the laws of its kind.

One file a kind; each is found under its function's name in `weft.testing`. See `docs/conformance.md`.
"""
