"""Linear attention as a recurrence: its definition, chunks, products and lazy matrix."""

__all__: list[str] = []
