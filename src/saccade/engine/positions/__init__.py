"""Positions of queries and keys, in the form that masks and kernels use."""

__all__: list[str] = []
