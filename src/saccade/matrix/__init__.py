"""Lazy matrices: exact softmax attention, its scores, gradients, stored weights, and sums and products of matrices."""

from saccade.matrix.attention_matrix import AttentionMatrix, Impl, ScoreMatrix, matrix_from_inputs
from saccade.matrix.dense_matrix import DenseMatrix
from saccade.matrix.functions import attention, attention_with_lse
from saccade.matrix.gradient_matrix import ElementwiseProduct, GradientMatrix
from saccade.matrix.matrix import DerivedMatrix, Matrix
from saccade.statistics.row_block import Block
from saccade.statistics.statistic import DENSE_LIMIT
from saccade.statistics.transposed import Transposed

__all__ = [
    "DENSE_LIMIT",
    "AttentionMatrix",
    "Block",
    "DenseMatrix",
    "DerivedMatrix",
    "ElementwiseProduct",
    "GradientMatrix",
    "Impl",
    "Matrix",
    "ScoreMatrix",
    "Transposed",
    "attention",
    "attention_with_lse",
    "matrix_from_inputs",
]
