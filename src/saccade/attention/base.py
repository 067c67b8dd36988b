"""What weights and scores of softmax attention have in common: the ingredients that they are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.ingredients import Ingredients
from saccade.engine.tiles import positions
from saccade.matrix import Matrix
from saccade.plan import Ranges, Strip, Tile

__all__ = ["OfIngredients"]


class OfIngredients(Matrix):
    """A matrix that is computed from checked queries, keys and a rule."""

    ingredients: Ingredients

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.ingredients.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.ingredients.dtype

    @property
    def device(self) -> torch.device:
        return self.ingredients.query.device

    @property
    def kv_heads(self) -> int:
        return self.ingredients.key.shape[1]

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        batch, heads, _, _ = self.shape
        strips = tuple(Strip(span, True) for span in columns)
        given = self.ingredients
        return positions(given, Tile(slice(0, batch), slice(0, heads), rows, strips, given.rule))
