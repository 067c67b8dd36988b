"""Convert tensors, text and the masks of other libraries to masks, pack sequences, and serialise masks."""

__all__: list[str] = []
