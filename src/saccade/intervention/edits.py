"""Edits of attention: changes to the matrix of a call, or to the output of some heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from saccade.integrations.matrix_hooks import MakeMatrix
from saccade.integrations.tensor_masks import both
from saccade.intervention.edited_matrix import ChangeOutput, EditedMatrix, ReplacedHeads
from saccade.masks import Mask, as_mask
from saccade.matrix import Matrix
from saccade.matrix.algebra import ByRows
from saccade.support.errors import shown, type_error, unsupported, value_error
from saccade.support.validation import is_integer

CALLED_AS = "intervene"  # the name in error messages

How = Literal["zero", "mean", "resample"]
"""The ways to remove a head's output: replace it by 0, by its mean over the batch, or by that of another batch item."""


Head = int | Sequence[int] | None
"""The index of a head, several indices, or None for all heads."""


@dataclass(eq=False)
class Edit:
    """A change to the attention of one or more layers.

    Attributes:
        layer: name of a layer, with ``*`` for any characters; or its index, in the order in which layers first run.
        heads: indices of heads; None for all heads.
        was_used: whether the edit has been applied to a call.
    """

    layer: str | int
    heads: tuple[int, ...] | None
    was_used: bool = False

    def heads_of(self, count: int) -> tuple[int, ...]:
        """Return the indices of the edited heads of a layer with ``count`` heads.

        Raises:
            ValueError: a head does not exist.
        """
        if self.heads is None:
            return tuple(range(count))
        if not all(0 <= head < count for head in self.heads):
            raise value_error("head", f"be from 0 to {count - 1} in layer {self.layer}", list(self.heads))
        return self.heads


@dataclass(eq=False)
class MaskEdit(Edit):
    """An edit that combines a mask with the call's mask by ``&``."""

    mask: object = None


@dataclass(eq=False)
class PatternEdit(Edit):
    """An edit that replaces the attention matrix of some heads.

    Attributes:
        matrix: the replacement, which may cover a longer sequence than a call does.
        used_rows: number of leading rows of the replacement that calls have used.
    """

    matrix: Matrix | None = None
    used_rows: int = 0


@dataclass(eq=False)
class OutputEdit(Edit):
    """An edit that changes the output of heads, ``[batch, heads, q_len, value_dim]``.

    Attributes:
        factor: multiplies the output; a number, or a tensor that broadcasts to the output.
        how: how to remove the output before the factor is applied; if None, the output is kept.
        seed: selects the other batch item for "resample".
    """

    factor: float | Tensor = 1.0
    how: How | None = None
    seed: int = 0

    def change(self, out: Tensor) -> Tensor:
        """Return the changed output of a call.

        Raises:
            UnsupportedError: the edit needs other batch items, but the batch has only one.
        """
        heads = self.heads_of(out.shape[1])
        index = torch.tensor(heads, device=out.device)
        selected = out.index_select(1, index)
        if self.how in ("mean", "resample") and len(out) < 2:
            raise unsupported(f"how={self.how!r}", ["the batch has one item"], hint="how='zero', or a larger batch")
        if self.how == "zero":
            selected = torch.zeros_like(selected)
        elif self.how == "mean":
            selected = selected.mean(0, keepdim=True).expand_as(selected)
        elif self.how == "resample":
            selected = selected.roll(1 + self.seed % (len(out) - 1), 0)
        return out.index_copy(1, index, (selected * self.factor).to(out.dtype))


def checked_target(layer: object, head: object) -> tuple[str | int, tuple[int, ...] | None]:
    """Validate the layer and the heads of an edit, and return them; a single head becomes a tuple."""
    if not isinstance(layer, str) and not (is_integer(layer) and layer >= 0):
        raise type_error("layer", "be a name, or a number of 0 or more", shown(layer))
    if head is None:
        return layer, None
    heads = (head,) if is_integer(head) else head
    if not isinstance(heads, Sequence) or isinstance(heads, str) or not heads or not all(map(is_integer, heads)):
        raise type_error("head", "be a number, a list of numbers, or None for all heads", shown(head))
    return layer, tuple(int(index) for index in heads)


def edited(edits: Sequence[Edit], make: MakeMatrix, matrix: Matrix) -> Matrix:
    """Return the matrix of a call after its edits: first masks, then patterns, then changes to the output.

    Args:
        edits: the layer's edits, in the order in which they were added.
        make: returns the matrix of the call with an additional mask.
        matrix: the matrix of the call.
    """
    rules: dict[int, Mask] = {}
    parts: list[ReplacedHeads] = []
    changes: list[ChangeOutput] = []
    heads = matrix.shape[1]
    for edit in edits:
        edit.was_used = True
        edited_heads = edit.heads_of(heads)
        if isinstance(edit, MaskEdit):
            rule = as_mask(edit.mask, matrix.shape)
            rules.update((head, both(rules[head], rule) if head in rules else rule) for head in edited_heads)
        elif isinstance(edit, PatternEdit):
            assert edit.matrix is not None
            parts.append(ReplacedHeads(edited_heads, _rows_for(edit.matrix, matrix)))
            is_part = edit.matrix.shape[2] > matrix.shape[2]  # the call covers the start of the pattern's sequence
            edit.used_rows = max(edit.used_rows, matrix.shape[3 if is_part else 2])
        elif isinstance(edit, OutputEdit):
            changes.append(edit.change)
    masked = [
        ReplacedHeads(tuple(head for head in rules if rules[head] is rule), make(rule), True)
        for rule in dict.fromkeys(rules.values())
    ]
    if len(masked) == 1 and len(masked[0].heads) == heads:
        matrix, masked = masked[0].matrix, []
    return EditedMatrix(matrix, [*masked, *parts], changes) if masked or parts or changes else matrix


class _StepRows(ByRows):
    """The rows of a sequence's causal matrix that belong to one decoding step.

    Args:
        inner: the matrix of the whole sequence.
        like: the matrix of the decoding step; its last query is aligned with its last key.
    """

    def __init__(self, inner: Matrix, like: Matrix):
        super().__init__(inner)
        _, _, self._q_len, self._kv_len = like.shape
        self._first = self._kv_len - self._q_len

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.inner.shape[:2], self._q_len, self._kv_len)

    def rows_of(self, batch: int, head: int, rows: range) -> Tensor:
        weights = self.inner[batch, head, self._first + rows.start : self._first + rows.stop]
        if bool(weights[:, self._kv_len :].any()):
            reason = f"rows of the pattern attend beyond the {self._kv_len} keys of the call"
            raise unsupported("pattern", [reason], hint="a pattern for a call with a cache must be causal")
        return weights[:, : self._kv_len]


def _rows_for(pattern: Matrix, matrix: Matrix) -> Matrix:
    """Return the rows of a pattern that replace the matrix of a call.

    Raises:
        ValueError: the pattern does not fit the call.
    """
    batch, heads, q_len, kv_len = matrix.shape
    own_batch, own_heads, own_q, own_kv = pattern.shape
    if own_heads == heads and own_batch in (1, batch):
        if (own_q, own_kv) == (q_len, kv_len):
            return pattern
        if own_q == own_kv and q_len <= kv_len <= own_kv:  # a decoding step within the pattern's sequence
            return _StepRows(pattern, matrix)
    rule = f"have the shape of the call, {list(matrix.shape)}, or come from a longer sequence"
    raise value_error("pattern", rule, list(pattern.shape), hint="record the pattern on an input of the same length")
