"""Masks for tokens on a grid: windows, rows and columns, neighborhoods."""

__all__: list[str] = []
