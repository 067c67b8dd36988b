"""DotProducts: the scores of attention itself."""

from __future__ import annotations

from torch import Tensor

from saccade.engine.tiles.grouped_heads import product
from saccade.mechanisms.scorers.base import Scorer, ScoreRows, exact_dtype

__all__ = ["DotProducts"]


class DotProducts(Scorer):
    """The query times the key: keys are chosen by the scores that attention itself gives them, head by head.

    Nothing is cheaper by that: it is the best that a scorer can do, to set others against.

    Cost: that of all scores, in float64.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0], [3.0]])[None, None]
        >>> DotProducts().on(x, x, 1)(range(1, 2), 2)
        tensor([[[[3., 9.]]]], dtype=torch.float64)
    """

    def on(self, query: Tensor, key: Tensor, block_size: int) -> ScoreRows:
        wide = exact_dtype(query.device)
        keys = key.to(wide)
        return lambda rows, stop: product(query[:, :, rows.start : rows.stop].to(wide), keys[:, :, :stop].mT)
