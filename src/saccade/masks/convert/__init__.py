"""Conversion of tensors, text and the masks of other libraries to masks, and back."""

__all__: list[str] = []
