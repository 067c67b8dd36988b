"""What a memory of whole segments is made of."""

__all__: list[str] = []
