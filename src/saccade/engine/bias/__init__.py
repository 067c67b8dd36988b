"""Terms added to the scores: dense biases, biases by distance, score functions, and the sink logit."""

__all__: list[str] = []
