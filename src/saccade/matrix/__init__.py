"""The lazy matrix: what every attention answers, parts of it, and what is made of several."""

from saccade.matrix.matrix import DENSE_LIMIT, Block, Matrix, Transposed

__all__ = ["DENSE_LIMIT", "Block", "Matrix", "Transposed"]
