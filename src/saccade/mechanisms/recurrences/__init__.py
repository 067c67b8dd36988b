"""Recurrences of linear attention: their definition, chunks, products, and lazy matrix."""

__all__: list[str] = []
