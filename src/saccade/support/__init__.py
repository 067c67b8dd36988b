"""Errors, validation, argument hints, numerics and lazy imports that every layer uses."""

__all__: list[str] = []
