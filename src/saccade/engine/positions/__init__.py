"""Positions of queries and keys as kernels read them."""

__all__: list[str] = []
