"""Positions of queries and keys, as masks and kernels read them."""

__all__: list[str] = []
