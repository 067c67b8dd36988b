"""Sums over features of keys, never computed pair by pair: shared by Linear and Performer."""

__all__: list[str] = []
