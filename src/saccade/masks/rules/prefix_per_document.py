"""PrefixPerDocument: a mask of packed documents in which all tokens of a document see its first tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from saccade.masks.rules.documents import lengths_per_item
from saccade.masks.rules.range_table import RangeTable
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error


@argument_hints(
    lengths="PrefixPerDocument([5, 3], [2, 1]): tokens of each document, and how many of them are its prefix"
)
@dataclasses.dataclass(frozen=True)
class PrefixPerDocument(RangeTable):
    """A mask of packed documents: every token sees the first ``prefixes[i]`` tokens of its own document i.

    Joined with causal documents, it is a prefix LM in each document, with bidirectional attention in the prefix:
    ``Documents(lengths, rule=Causal()) | PrefixPerDocument(lengths, prefixes)``.

    >>> from saccade.masks import Causal, Documents
    >>> lengths = [4, 3]
    >>> print((Documents(lengths, rule=Causal()) | PrefixPerDocument(lengths, [2, 3])).picture(7))
    1 1 . . . . .
    1 1 . . . . .
    1 1 1 . . . .
    1 1 1 1 . . .
    . . . . 1 1 1
    . . . . 1 1 1
    . . . . 1 1 1

    Args:
        lengths: lengths of the documents, as in `Documents`: a list for all batch items, or a list per batch item.
        prefixes: number of tokens in the prefix of each document, from 0 to the document's length, in lists of the same
            form as ``lengths``.

    Raises:
        ValueError: lengths are negative, or a prefix is longer than its document or missing.
        TypeError: an argument is not a list.
    """

    lengths: tuple[tuple[int, ...], ...]
    prefixes: tuple[tuple[int, ...], ...]
    is_fact_of_batch = True

    def __init__(
        self,
        lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        prefixes: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    ):
        items, heads = lengths_per_item(lengths), lengths_per_item(prefixes, "prefixes")
        if [len(item) for item in items] != [len(item) for item in heads]:
            counts = " and ".join(str([len(item) for item in both]) for both in (items, heads))
            raise value_error("lengths and prefixes", "contain equally many numbers", counts)
        for item, head in zip(items, heads, strict=True):
            for length, prefix in zip(item, head, strict=True):
                if prefix > length:
                    raise value_error(
                        "prefixes", "be at most the length of each document", f"prefix {prefix} and length {length}"
                    )
        object.__setattr__(self, "lengths", items)
        object.__setattr__(self, "prefixes", heads)
        starts = [np.repeat(np.cumsum(item) - item, item)[:, None].astype(np.int64) for item in items]
        sizes = [np.repeat(head, item)[:, None].astype(np.int64) for item, head in zip(items, heads, strict=True)]
        self._set_ranges(starts, [start + size for start, size in zip(starts, sizes, strict=True)])
