"""Additive terms of the scores: dense, relative, by function, and the sink logit."""

__all__: list[str] = []
