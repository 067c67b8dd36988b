"""Recurrences: their rule, its chunks, the products, and the matrix."""

__all__: list[str] = []
