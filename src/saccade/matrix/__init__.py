"""Lazy matrices: exact softmax attention, parts of it, and matrices derived from others."""

from saccade.matrix.attention_matrix import AttentionMatrix, Impl, matrix_from_inputs
from saccade.matrix.functions import attention, attention_with_lse
from saccade.matrix.matrix import DENSE_LIMIT, Block, Matrix, Transposed
from saccade.matrix.score_matrix import ScoreMatrix

__all__ = [
    "DENSE_LIMIT",
    "AttentionMatrix",
    "Block",
    "Impl",
    "Matrix",
    "ScoreMatrix",
    "Transposed",
    "attention",
    "attention_with_lse",
    "matrix_from_inputs",
]
