"""Tiles: scores of a tile, splitting of tiles, and products of grouped heads."""

__all__: list[str] = []
