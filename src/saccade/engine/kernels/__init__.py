"""Kernels: one way to run a product per file, and what each computes and allocates."""

__all__: list[str] = []
