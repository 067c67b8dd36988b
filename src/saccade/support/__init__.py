"""Errors, validation, numerics and lazy imports that every layer uses."""

__all__: list[str] = []
