"""The masks, one kind in each file."""

__all__: list[str] = []
