"""Masks on tokens in a grid: windows, rows and columns, neighbourhoods."""

__all__: list[str] = []
