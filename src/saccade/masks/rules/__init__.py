"""Mask classes, one per file."""

__all__: list[str] = []
