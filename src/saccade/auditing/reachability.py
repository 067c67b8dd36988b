"""Reach: which token may influence which output, for a rule in each layer, closed over the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.masks import Mask
from saccade.support.errors import type_error, value_error
from saccade.support.validation import check_int

_LONGEST = 16_384  # a rule is written out once, one byte for each pair: 256 MB
_BLOCK = 128  # rows that are written out, or read, at a time: hardly anything is held beside the rule


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

    Cost: a byte for each pair of tokens and distinct rule (and batch item, where the rule tells them apart); a step
    through a layer reads them once, and layers that are alike are left as soon as a set no longer grows.

    Example:
        >>> from saccade import masks
        >>> reach = Reach([masks.Window(1, 0)] * 2, batch=1, length=5)
        >>> reach.sources(reach.one(0, 4)).int()
        tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
    """

    def __init__(self, rules: Sequence[Mask], *, batch: int, length: int):
        wrong = [type(rule).__name__ for rule in rules if not isinstance(rule, Mask)]
        if wrong or not rules:
            raise type_error("rules", "be masks, one for each layer", wrong or "none")
        check_int("batch", batch, 1)
        if check_int("length", length, 1) > _LONGEST:
            raise value_error("length", f"be at most {_LONGEST:,}, since each pair takes a byte", length)
        self.rules, self.shape = tuple(rules), (batch, length)
        known = {rule: _written(rule, batch, length) for rule in dict.fromkeys(rules)}
        self._layers = [known[rule] for rule in rules]

    def own(self, layer: int) -> Tensor:
        """What one layer allows, bool ``[batch, length, length]``."""
        return self._layers[layer]

    def through(self, keys: Tensor, layers: int | None = None) -> Tensor:
        """Tokens that some of these may influence in so many layers (all when None), bool ``[batch, length]``."""
        return _grown(keys, self._layers[:layers], _who_see)

    def sources(self, rows: Tensor) -> Tensor:
        """Tokens that may influence some of these outputs, bool ``[batch, length]``."""
        return _grown(rows, reversed(self._layers), _seen_by)

    def one(self, item: int, place: int) -> Tensor:
        """The set of a single token."""
        found = torch.zeros(self.shape, dtype=torch.bool)
        found[item, place] = True
        return found

    def components(self) -> tuple[Tensor, int]:
        """Tokens that any path joins, whichever way: a number for each, int64 ``[batch, length]``, and how many.

        Cost: the row and the column of each token are read once.
        """
        label, count = np.full(self.shape, -1), 0
        rules = list({id(layer): layer for layer in self._layers}.values())
        for item, own in enumerate(label):
            for place in range(len(own)):
                fresh = np.arange(len(own)) == place if own[place] < 0 else np.zeros(0, dtype=bool)
                count += int(fresh.any())
                while fresh.any():
                    own[fresh] = count - 1
                    near = [step(rule[item].numpy(), fresh) for rule in rules for step in (_who_see, _seen_by)]
                    fresh = np.logical_or.reduce(near) & (own < 0)
        return torch.from_numpy(label), count


_Bools = NDArray[np.bool_]


def _written(rule: Mask, batch: int, length: int) -> Tensor:
    """What a rule allows in some head, bool ``[batch, length, length]``; held once where all items have the same."""
    items, heads = batch if rule.shape[0] > 1 else 1, rule.shape[1]
    seen = torch.empty(items, length, length, dtype=torch.bool)
    for start in range(0, length, _BLOCK):
        rows = range(start, min(start + _BLOCK, length))
        part = rule.to_dense(len(rows), length, batch=items, heads=heads, q_positions=rows)
        seen[:, start : start + _BLOCK] = part.any(1)
    return seen.expand(batch, -1, -1)


def _grown(tokens: Tensor, layers: Iterable[Tensor], step: Callable[[_Bools, _Bools], _Bools]) -> Tensor:
    """A set after a step through each layer, beside whose residual connection nothing is lost."""
    settled = None
    for layer in layers:
        if layer is settled:
            continue
        near = [step(rule.numpy(), own.numpy()) for rule, own in zip(layer, tokens, strict=True)]
        grown = tokens | torch.from_numpy(np.stack(near))
        tokens, settled = grown, layer if torch.equal(grown, tokens) else None
    return tokens


def _who_see(rule: _Bools, keys: _Bools) -> _Bools:
    """Rows that some key is allowed to, bool ``[length]``; columns are copied as long as they are few."""
    if np.count_nonzero(keys) < _BLOCK:
        return np.asarray(rule[:, keys].any(1))
    return np.concatenate([(rule[start : start + _BLOCK] & keys).any(1) for start in range(0, len(rule), _BLOCK)])


def _seen_by(rule: _Bools, rows: _Bools) -> _Bools:
    """Keys that some row is allowed, bool ``[length]``."""
    found, places = np.zeros(rule.shape[1], dtype=bool), np.flatnonzero(rows)
    for start in range(0, len(places), _BLOCK):
        found |= rule[places[start : start + _BLOCK]].any(0)
    return found
