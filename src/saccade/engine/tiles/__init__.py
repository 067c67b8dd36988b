"""Scores of one tile, the splitting of tiles, and products of grouped heads."""

__all__: list[str] = []
