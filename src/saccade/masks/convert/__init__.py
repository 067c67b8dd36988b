"""Conversion of tensors, text and other libraries' masks to masks, and back."""

__all__: list[str] = []
