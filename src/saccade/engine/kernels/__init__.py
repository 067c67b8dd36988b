"""Kernels: one implementation of ``A @ value`` per file, with its cost in operations and memory."""

__all__: list[str] = []
