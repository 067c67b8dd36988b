"""Errors, validation, numerics and lazy imports that every layer uses."""
