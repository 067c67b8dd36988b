"""Scores of one tile, and how tiles are split."""

__all__: list[str] = []
