"""Modifications of attention scores: dense biases, distance-dependent biases, score functions and the sink logit."""

__all__: list[str] = []
