"""Lazy matrices: exact softmax attention, parts of it, and matrices derived from others."""

from saccade.matrix.attention_matrix import AttentionMatrix, Impl, matrix_from_inputs
from saccade.matrix.functions import attention, attention_with_lse
from saccade.matrix.matrix import DerivedMatrix, Matrix
from saccade.matrix.score_matrix import ScoreMatrix
from saccade.statistics.row_block import Block
from saccade.statistics.sparse import DENSE_LIMIT
from saccade.statistics.transposed import Transposed

__all__ = [
    "DENSE_LIMIT",
    "AttentionMatrix",
    "Block",
    "DerivedMatrix",
    "Impl",
    "Matrix",
    "ScoreMatrix",
    "Transposed",
    "attention",
    "attention_with_lse",
    "matrix_from_inputs",
]
