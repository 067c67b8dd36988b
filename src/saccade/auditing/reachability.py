"""Reach: the tokens that may influence each output, for a rule in each layer, composed over the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.masks import Mask
from saccade.support.errors import type_error, value_error
from saccade.support.validation import check_int

_LONGEST = 16_384  # a rule is stored dense, one byte for each pair: 256 MB
_BLOCK = 128  # rows that are written or read at a time, so that little memory is needed beside the rule


class Reach:
    r"""A rule for each layer, composed over the layers: it maps sets of tokens to the outputs they may influence.

    .. math:: R = (I \vee M_L) \circ \dots \circ (I \vee M_1)

    M_l has the pairs that layer l allows in some head; I is the residual connection, through which every token reaches
    itself. If all layers have one rule with a closed form, R is ``rule ** layers``; sets need no closed form.

    Args:
        rules: the masks of the layers, first to last.
        batch: number of batch items; nothing passes from one to another.
        length: number of tokens of each.

    Raises:
        TypeError, ValueError: a rule that is no mask, no layers, sizes below 1, more than 16,384 tokens.

    Cost: a byte for each pair of tokens and distinct rule (and batch item, if the rule distinguishes them); a step
    through a layer reads them once, and equal layers are skipped as soon as a set no longer grows.

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
        """Return the pairs that one layer allows, bool ``[batch, length, length]``."""
        return self._layers[layer]

    def through(self, keys: Tensor, layers: int | None = None) -> Tensor:
        """Return the rows that these tokens may influence in some layers (all when None), bool ``[batch, length]``."""
        return _grown(keys, self._layers[:layers], _rows_of)

    def sources(self, rows: Tensor) -> Tensor:
        """Return the tokens that may influence some of these outputs, bool ``[batch, length]``."""
        return _grown(rows, reversed(self._layers), _keys_of)

    def one(self, item: int, place: int) -> Tensor:
        """Return the set of a single token."""
        token = torch.zeros(self.shape, dtype=torch.bool)
        token[item, place] = True
        return token

    def components(self) -> tuple[Tensor, int]:
        """Return the connected component of each token, int64 ``[batch, length]``, and the number of components.

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
                    near = [step(rule[item].numpy(), fresh) for rule in rules for step in (_rows_of, _keys_of)]
                    fresh = np.logical_or.reduce(near) & (own < 0)
        return torch.from_numpy(label), count


_Bools = NDArray[np.bool_]


def _written(rule: Mask, batch: int, length: int) -> Tensor:
    """Return the pairs that a rule allows in some head, bool ``[batch, length, length]``; equal items share memory."""
    items, heads = batch if rule.shape[0] > 1 else 1, rule.shape[1]
    allowed = torch.empty(items, length, length, dtype=torch.bool)
    for start in range(0, length, _BLOCK):
        rows = range(start, min(start + _BLOCK, length))
        part = rule.to_dense(len(rows), length, batch=items, heads=heads, q_positions=rows)
        allowed[:, start : start + _BLOCK] = part.any(1)
    return allowed.expand(batch, -1, -1)


def _grown(tokens: Tensor, layers: Iterable[Tensor], step: Callable[[_Bools, _Bools], _Bools]) -> Tensor:
    """Return a set of tokens after a step through each layer; the residual connection keeps all of them."""
    settled = None
    for layer in layers:
        if layer is settled:
            continue
        near = [step(rule.numpy(), own.numpy()) for rule, own in zip(layer, tokens, strict=True)]
        grown = tokens | torch.from_numpy(np.stack(near))
        tokens, settled = grown, layer if torch.equal(grown, tokens) else None
    return tokens


def _rows_of(rule: _Bools, keys: _Bools) -> _Bools:
    """Return the rows that may attend to some of these keys, bool ``[length]``; a few columns are copied."""
    if np.count_nonzero(keys) < _BLOCK:
        return np.asarray(rule[:, keys].any(1))
    return np.concatenate([(rule[start : start + _BLOCK] & keys).any(1) for start in range(0, len(rule), _BLOCK)])


def _keys_of(rule: _Bools, rows: _Bools) -> _Bools:
    """Return the keys that some of these rows may attend to, bool ``[length]``."""
    keys, places = np.zeros(rule.shape[1], dtype=bool), np.flatnonzero(rows)
    for start in range(0, len(places), _BLOCK):
        keys |= rule[places[start : start + _BLOCK]].any(0)
    return keys
