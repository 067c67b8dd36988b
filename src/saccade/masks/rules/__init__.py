"""Mask classes, such as `Causal` and `Window`, with one file for each class."""

__all__: list[str] = []
