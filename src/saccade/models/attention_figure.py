"""Draw the attention between words in a model's most informative head."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade import viz
from saccade.matrix import Matrix
from saccade.statistics import Head, rank_heads, unexplained_information
from saccade.support.errors import value_error
from saccade.support.language import translated
from saccade.support.validation import check_bool
from saccade.text import Word, merge
from saccade.text.scripts import is_mostly_chinese

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST = 512  # largest number of tokens for which all weights are computed
_BINS = 256  # bins on each side of the pooled maps of longer texts
_warned = False
_UNKNOWN_AT_MOST = 0.25  # largest share of unknown words for which no warning is issued
_ANNOTATED_AT_MOST = 24  # maximum number of words for writing weights into cells; with more, they would be illegible


def figure_of(
    matrices: Sequence[Matrix],
    words: Sequence[Word],
    *,
    layer: int | None,
    head: int | None,
    hide_special: bool,
    title: str | None,
) -> Figure:
    """Draw the attention between the words of a text in one head of a model.

    Args:
        matrices: attention matrices of one batch item, one for each layer.
        words: the words of the tokens.
        layer, head: the head to draw; when None, the head with the most unexplained information.
        hide_special: whether special tokens such as [CLS] are left out of the figure.
        title: the title, with a description of the figure below it; if None, the description is the title.

    Raises:
        ValueError: the layer or head does not exist, there are no words, or the text is too long to hide its special
            tokens.
        ImportError: matplotlib is not installed.
    """
    for name, index, count in (("layer", layer, len(matrices)), ("head", head, matrices[0].shape[1])):
        if index is not None and not 0 <= index < count:
            raise value_error(name, f"be from 0 to {count - 1}", index)
    if all(word.special for word in words):
        raise value_error("text", "have at least one word", "no words")
    if check_bool("hide_special", hide_special) and matrices[0].shape[3] > _LONGEST:
        raise value_error("hide_special", f"be False for a text of more than {_LONGEST} tokens", True)
    with torch.no_grad():
        best = _most_informative(matrices, words, layer, head)
        where = translated("layer {layer}, head {head}", layer=best.layer, head=best.head)
        caption = translated("Attention of each word (row) to each word (column): {where}", where=where)
        shown: Matrix | Tensor = matrices[best.layer]
        if shown.shape[3] > _LONGEST:
            labels = [word.text for word in words for _ in range(word.start, word.stop)]
        else:
            kept = [index for index, word in enumerate(words) if not (hide_special and word.special)]
            shown = merge(matrices[best.layer].to_dense()[0, best.head], words)[kept][:, kept]
            labels = [words[index].text for index in kept]
    return viz.heatmap(
        shown,
        head=best.head if isinstance(shown, Matrix) else None,
        x_labels=labels,
        y_labels=labels,
        annotate=len(labels) <= _ANNOTATED_AT_MOST,
        title=caption if title is None else title,
        subtitle=None if title is None else caption,
    )


def warn_of_unknown_words(text: str, words: Sequence[Word]) -> None:
    """Warn the caller of `Encoder.show`, once per process, if many words of a text are not in the vocabulary.

    Args:
        text: the text.
        words: the words of the text's tokens.
    """
    global _warned  # noqa: PLW0603  once per process
    unknown = sum(word.unknown for word in words)
    count = sum(not word.special for word in words)
    if unknown > _UNKNOWN_AT_MOST * count and not _warned:
        _warned = True
        other = "saccade.models.chinese_encoder() reads Chinese" if is_mostly_chinese(text) else "choose another model"
        warnings.warn(
            f"show: the model does not know {unknown} of {count} words, so their attention means little; {other}",
            stacklevel=3,
        )


def _most_informative(matrices: Sequence[Matrix], words: Sequence[Word], layer: int | None, head: int | None) -> Head:
    """Return the layer and head to draw in the attention figure.

    If ``layer`` or ``head`` is None, choose the head whose attention between words is least explained by distance and
    by words to which most words attend.
    """
    if layer is not None and head is not None:
        return Head(layer, head, float("nan"))
    layers = range(len(matrices)) if layer is None else [layer]
    values = torch.full((len(matrices), matrices[0].shape[1]), -1.0, dtype=torch.float64)
    for number in layers:
        values[number] = unexplained_information(_among_words(matrices[number], words)).cpu()
    return rank_heads(values, layer=layer, head=head)[0]


def _among_words(matrix: Matrix, words: Sequence[Word]) -> Tensor:
    """Return attention weights between words for choosing a head, ``[heads, n, n]``.

    For a long text, return pooled maps of the matrix instead, because they need less memory.
    """
    if matrix.shape[3] > _LONGEST:
        return matrix.pooled(_BINS)[0]
    ordinary = [number for number, word in enumerate(words) if not word.special]
    return merge(matrix.to_dense()[0], words)[:, ordinary][..., ordinary]
