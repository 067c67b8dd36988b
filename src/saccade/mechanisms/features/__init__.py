"""Linear attention as sums over features of keys, without computing every pair; used by Linear and Performer."""

__all__: list[str] = []
