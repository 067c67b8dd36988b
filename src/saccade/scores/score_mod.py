"""Modified: a score changed pair by pair by a user's function (``score_mod``)."""

from __future__ import annotations

from torch import Tensor

from saccade.scores.base import Prepared, Score, ScoreMod
from saccade.scores.dot import Dot
from saccade.support.errors import kind, type_error
from saccade.support.validation import check_type


class Modified(Score):
    r"""A score changed pair by pair by a function, like FlexAttention's ``score_mod``.

    .. math:: s_{ij} = f(\mathrm{softcap}(\mathrm{scale} \cdot \mathrm{score}(q_i, k_j)),\ b,\ h,\ i,\ j)
              + \mathrm{bias}_{ij}

    The function is called for one tile at a time, with scores ``[batch, heads, rows, columns]`` and with
    four-dimensional int64 tensors that broadcast to them: batch item, head, and positions of query and key.
    (FlexAttention counts queries from 0; here the last query is at the last key unless positions are given.) Tensors
    that the function captures receive gradients, and so do its parameters if it is a module. Results for masked pairs
    have no effect.

    ``score=`` also accepts a plain function, which then changes scaled dot products.

    Args:
        function: ``(score, b, h, q, kv) -> score``, composed of differentiable torch operations; it must always return
            the same result for the same pair.
        score: the score to change; the dot product when None.

    Raises:
        TypeError: ``function`` is not a function, or ``score`` is not a score.

    Cost: as for the `tiled` kernel, plus the function's passes over each tile. Memory is needed for a single tile.

    Example:
        >>> import torch
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 3, 8)
        >>> AttentionMatrix(x, x, score=lambda score, b, h, q, kv: score - (q - kv).abs())[0, 0, 0]
        tensor([0.6652, 0.2447, 0.0900])

    Reference: Dong et al. 2024, arXiv:2412.05496, section 3.
    """

    def __init__(self, function: ScoreMod, score: Score | None = None):
        super().__init__()
        if not callable(function) or isinstance(function, Score | type):
            got = function.__name__ if isinstance(function, type) else kind(function)
            raise type_error("function", "be a function (score, b, h, q, kv) -> score", got)
        if score is not None:
            check_type("score", score, Score, "be a saccade Score or None")
        self.score = Dot() if score is None else score
        self.function = function

    @property
    def widths(self) -> tuple[int, int] | None:
        return self.score.widths

    def default_scale(self, head_dim: int) -> float:
        return self.score.default_scale(head_dim)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        inner = self.score.prepare(query, key)
        return inner._replace(modify=self.function if inner.modify is None else _composed(inner.modify, self.function))

    def extra_repr(self) -> str:
        return f"function={getattr(self.function, '__name__', type(self.function).__name__)}"


def _composed(first: ScoreMod, second: ScoreMod) -> ScoreMod:
    def function(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return second(first(score, b, h, q, kv), b, h, q, kv)

    return function
