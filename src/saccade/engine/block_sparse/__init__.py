"""Attention over selected blocks of keys."""

__all__: list[str] = []
