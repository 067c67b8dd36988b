"""Masks on tokens in a grid: windows, rows and columns, neighborhoods."""

__all__: list[str] = []
