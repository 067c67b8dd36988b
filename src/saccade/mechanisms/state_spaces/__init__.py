"""State spaces that do not change from token to token: convolutions, and recurrences."""

__all__: list[str] = []
