"""Masks for tokens on a grid, such as windows, rows and columns, and neighborhoods."""

__all__: list[str] = []
