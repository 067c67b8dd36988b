"""Linear attention as sums over features of keys, without computing pairs: shared by Linear and Performer."""

__all__: list[str] = []
