"""A figure of the head of a model that tells most about a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade import viz
from saccade.matrix import Matrix
from saccade.statistics import Head, rank_heads, unexplained_information
from saccade.support.errors import value_error
from saccade.text import Word, merge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_of"]

_LONGEST = 512  # tokens whose weights are written out, a layer at a time
_BINS = 256  # of the maps that heads of a longer text are compared by
_ANNOTATED_AT_MOST = 24  # words: the numbers of a larger map are too small to read on a screen


def figure_of(matrices: Sequence[Matrix], words: Sequence[Word], *, layer: int | None, head: int | None) -> Figure:
    """Draw what each word of a text looks at in one head.

    Args:
        where: for error messages.
        matrices: one for each layer, of one batch item.
        words: what the tokens stand for.
        layer, head: which; None for those in which the most information is unexplained.

    Raises:
        ValueError: a layer or head that is not there, or no word.
        ImportError: matplotlib is not installed.
    """
    for name, index, count in (("layer", layer, len(matrices)), ("head", head, matrices[0].shape[1])):
        if index is not None and not 0 <= index < count:
            raise value_error(name, f"be from 0 to {count - 1}", index)
    if all(word.special for word in words):
        raise value_error("text", "have at least one word", "nothing to look at")
    with torch.no_grad():
        best = _most_telling(matrices, words, layer, head)
        title = f"What each word (row) looks at (column): layer {best.layer}, head {best.head}"
        shown: Matrix | Tensor = matrices[best.layer]
        if shown.shape[3] > _LONGEST:
            labels = [word.text for word in words for _ in range(word.start, word.stop)]
        else:
            shown = merge(matrices[best.layer].to_dense()[0, best.head], words)
            labels = [word.text for word in words]
    return viz.heatmap(
        shown,
        head=best.head if isinstance(shown, Matrix) else None,
        x_labels=labels,
        y_labels=labels,
        annotate=len(words) <= _ANNOTATED_AT_MOST,
        title=title,
        x_name="looked at",
        y_name="word",
    )


def _most_telling(matrices: Sequence[Matrix], words: Sequence[Word], layer: int | None, head: int | None) -> Head:
    """The head, of those asked for, in which neither distance nor everybody's favourites explain most."""
    if layer is not None and head is not None:
        return Head(layer, head, float("nan"))
    layers = range(len(matrices)) if layer is None else [layer]
    values = torch.full((len(matrices), matrices[0].shape[1]), -1.0, dtype=torch.float64)
    for own in layers:
        values[own] = unexplained_information(_among_words(matrices[own], words)).cpu()
    return rank_heads(values, layer=layer, head=head)[0]


def _among_words(matrix: Matrix, words: Sequence[Word]) -> Tensor:
    """Weights between words that are no special tokens; of a long text, between stretches of it: ``[heads, n, n]``."""
    if matrix.shape[3] > _LONGEST:
        return matrix.pooled(_BINS)[0]
    ordinary = [number for number, word in enumerate(words) if not word.special]
    return merge(matrix.to_dense()[0], words)[:, ordinary][..., ordinary]
