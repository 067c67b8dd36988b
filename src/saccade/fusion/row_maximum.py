"""RowMaximum: the deferred maximum of each row of scores, which models subtract for a stable softmax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.fusion.axes import Axes
from saccade.fusion.scores import Scores, version_of


@dataclass(frozen=True)
class RowMaximum:
    """The maximum of lazy scores over the keys, with the key axis kept.

    Subtracting a number from a row does not change its softmax, and the gradient with respect to that number is 0. So
    ``(s - s.amax(-1, keepdim=True)).softmax(-1)`` is the softmax of ``s``.

    Args:
        of: the scores.
        axis: the key axis.
        operands: each tensor that was read, with its version counter at that time.
        is_detached: whether the maximum is detached from autograd's graph.
    """

    of: Scores
    axis: int
    operands: tuple[tuple[Tensor, int], ...]
    is_detached: bool = False
    softmax: None = None
    dropout_p: float = 0.0

    @property
    def axes(self) -> Axes:
        """The axes of the maximum, as the model sees them."""
        axes = self.of.axes.axes
        return Axes(self.of.axes.sizes, (*axes[: self.axis], (), *axes[self.axis + 1 :]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the maximum, as the model sees it."""
        return self.of.dtype

    @property
    def left(self) -> Tensor:
        """The left operand of the scores; it is on the same device as the scores."""
        return self.of.left

    @property
    def is_current(self) -> bool:
        """Whether all operands are unchanged since they were read."""
        return self.of.is_current

    def check_current(self) -> None:
        """Raise an error if code that calls no torch function has overwritten an operand."""
        self.of.check_current()

    def with_operands(self, tensors: Iterable[Tensor]) -> RowMaximum:
        """Return a copy of the maximum with additional operands."""
        return replace(self, operands=(*self.operands, *((x, version_of(x)) for x in tensors)))

    def detached(self) -> RowMaximum:
        """Return the maximum after ``detach()``."""
        return replace(self, is_detached=True)
