"""Reach: which token may influence which output, for a rule in each layer, closed over the layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.arguments import integer
from saccade.errors import type_error, value_error
from saccade.masks import Mask

__all__ = ["Reach"]

_LONGEST = 16_384  # a rule is written out once, one byte for each pair: 256 MB


class Reach:
    r"""A rule for each layer, closed over the layers: sets of tokens go in at one end and come out at the other.

    .. math:: R = (I \vee M_L) \circ \dots \circ (I \vee M_1)

    M_l is what layer l allows, in some head; I is the residual connection, through which every token reaches itself.
    Where all layers have one rule with a closed form, R is ``rule ** layers``; sets need none.

    Args:
        rules: the masks of the layers, first to last.
        batch: number of batch items; nothing passes from one to another.
        length: tokens of each.

    Raises:
        TypeError, ValueError: what is no mask, no layers, sizes below 1, more than 16,384 tokens.

    Cost: a byte for each pair of tokens and distinct rule; a step through a layer reads them once.

    Example:
        >>> from saccade import masks
        >>> reach = Reach([masks.Window(1, 0)] * 2, batch=1, length=5)
        >>> reach.sources(reach.one(0, 4)).int()
        tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
    """

    def __init__(self, rules: Sequence[Mask], *, batch: int, length: int):
        wrong = [type(rule).__name__ for rule in rules if not isinstance(rule, Mask)]
        if wrong or not rules:
            raise type_error("Reach", "rules", "be masks, one for each layer", wrong or "none")
        integer("Reach", "batch", batch, 1)
        if integer("Reach", "length", length, 1) > _LONGEST:
            raise value_error("Reach", "length", f"be at most {_LONGEST:,}, since each pair takes a byte", length)
        self.rules, self.shape = tuple(rules), (batch, length)
        itself = torch.eye(length, dtype=torch.bool)
        known: dict[Mask, Tensor] = {}
        for rule in rules:
            if rule not in known:
                known[rule] = rule.to_dense(length, batch=batch, heads=rule.shape[1]).any(1)
        self._own = [known[rule] for rule in rules]
        closed = {rule: seen | itself for rule, seen in known.items()}
        self._layers = [closed[rule] for rule in rules]

    def own(self, layer: int) -> Tensor:
        """What one layer allows, bool ``[batch, length, length]``."""
        return self._own[layer]

    def through(self, keys: Tensor, layers: int | None = None) -> Tensor:
        """Tokens that some of these may influence in so many layers (all when None), bool ``[batch, length]``."""
        for seen in self._layers[:layers]:
            keys = (seen & keys[:, None]).any(-1)
        return keys

    def sources(self, rows: Tensor) -> Tensor:
        """Tokens that may influence some of these outputs, bool ``[batch, length]``."""
        for seen in reversed(self._layers):
            rows = (seen & rows[..., None]).any(-2)
        return rows

    def one(self, item: int, place: int) -> Tensor:
        """The set of a single token."""
        found = torch.zeros(self.shape, dtype=torch.bool)
        found[item, place] = True
        return found

    def components(self) -> tuple[Tensor, int]:
        """Tokens that any path joins, whichever way: a number for each, int64 ``[batch, length]``, and how many."""
        label, count = torch.full(self.shape, -1), 0
        while bool((label < 0).any()):
            item, place = (label < 0).nonzero()[0].tolist()
            inside = self.one(item, place)
            while not torch.equal(inside, grown := inside | self.sources(inside) | self.through(inside)):
                inside = grown
            label[inside], count = count, count + 1
        return label, count
