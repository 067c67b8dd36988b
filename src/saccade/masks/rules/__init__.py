"""The rules: one kind of mask a file."""
