"""The rules: one kind of mask a file."""

__all__: list[str] = []
