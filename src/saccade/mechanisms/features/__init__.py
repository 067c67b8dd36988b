"""Linear attention computed from sums over key features instead of every pair; used by Linear and Performer."""

__all__: list[str] = []
