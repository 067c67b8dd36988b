"""Computation on tiles: scores of a tile, splitting of tiles, and products with grouped heads."""

__all__: list[str] = []
