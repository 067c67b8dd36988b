"""Kernels: implementations of ``A @ value``, one per file, each with its cost in operations and memory."""

__all__: list[str] = []
