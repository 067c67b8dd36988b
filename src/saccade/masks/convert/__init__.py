"""Convert tensors, text and masks of other libraries to masks, and back."""

__all__: list[str] = []
