"""Exact softmax attention: the matrix, its scores, and its product with values."""

from saccade.attention.functions import attention, attention_with_lse
from saccade.attention.matrix import AttentionMatrix, Impl, from_ingredients
from saccade.attention.scores import ScoreMatrix

__all__ = ["AttentionMatrix", "Impl", "ScoreMatrix", "attention", "attention_with_lse", "from_ingredients"]
