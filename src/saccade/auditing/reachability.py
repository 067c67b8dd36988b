"""The class `Reach`: which tokens may influence each output, given a rule for each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.masks import Mask
from saccade.support.errors import type_error, value_error
from saccade.support.validation import check_int

_LONGEST = 16_384  # a rule is stored densely, with one byte for each pair: up to 256 MB
_BLOCK = 128  # number of rows processed at a time, so that little memory is needed in addition to the rule


class Reach:
    r"""The composition of the rules of all layers. It maps a set of tokens to the outputs that the set may influence.

    .. math:: R = (I \vee M_L) \circ \dots \circ (I \vee M_1)

    M_l contains the pairs that layer l allows in some head. I is the residual connection, through which every token
    influences itself. If all layers have the same rule and its powers have a closed form, R is ``rule ** layers``; this
    class needs no closed form.

    Args:
        rules: the masks of the layers, first to last.
        batch: number of batch items; they do not influence each other.
        length: number of tokens of each item.
        beside: by layer index, the pairs that the layer's other modules connect before or after its rule, bool
            ``[batch, length, length]``.

    Raises:
        TypeError, ValueError: a rule is not a mask, there are no layers, a size is below 1, or there are more than
            16,384 tokens.

    Cost: one byte per pair of tokens for each distinct rule (and for each batch item, if the rule distinguishes them).
    A set is propagated by reading each layer's bytes once; equal layers are skipped once the set stops growing.

    Example:
        >>> from saccade import masks
        >>> reach = Reach([masks.Window(1, 0)] * 2, batch=1, length=5)
        >>> reach.sources(reach.one(0, 4)).int()
        tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
    """

    def __init__(
        self,
        rules: Sequence[Mask],
        *,
        batch: int,
        length: int,
        beside: Mapping[int, Sequence[Tensor]] | None = None,
    ):
        wrong = [type(rule).__name__ for rule in rules if not isinstance(rule, Mask)]
        if wrong or not rules:
            raise type_error("rules", "be masks, one for each layer", wrong or "none")
        check_int("batch", batch, 1)
        if check_int("length", length, 1) > _LONGEST:
            raise value_error("length", f"be at most {_LONGEST:,}, since each pair takes a byte", length)
        self.rules, self.shape = tuple(rules), (batch, length)
        known = {rule: _materialised(rule, batch, length) for rule in dict.fromkeys(rules)}
        self._own = [known[rule] for rule in rules]
        self._layers = list[Tensor]()
        for layer, own in enumerate(self._own):
            pairs = list((beside or {}).get(layer, ()))
            before = list((beside or {}).get(layer - 1, ()))
            is_like = layer > 0 and own is self._own[layer - 1] and len(pairs) == len(before)
            if is_like and all(map(torch.equal, pairs, before)):  # shared, so that `_propagated` can skip layers
                self._layers.append(self._layers[-1])
            else:
                self._layers.append(_with_other_modules(own, pairs))

    def own(self, layer: int) -> Tensor:
        """Return the pairs that the rule of one layer allows, bool ``[batch, length, length]``."""
        return self._own[layer]

    def through(self, keys: Tensor, layers: int | None = None) -> Tensor:
        """Return the rows that the tokens ``keys`` may influence through the first layers, bool ``[batch, length]``.

        ``layers`` is the number of layers; None means all.
        """
        return _propagated(keys, self._layers[:layers], _rows_of)

    def sources(self, rows: Tensor) -> Tensor:
        """Return the tokens that may influence any of the output rows, bool ``[batch, length]``."""
        return _propagated(rows, reversed(self._layers), _keys_of)

    def one(self, item: int, position: int) -> Tensor:
        """Return the set that contains only the token at ``position`` of ``item``, bool ``[batch, length]``."""
        token = torch.zeros(self.shape, dtype=torch.bool)
        token[item, position] = True
        return token

    def components(self) -> tuple[Tensor, int]:
        """Return the connected component of each token, int64 ``[batch, length]``, and the number of components.

        Cost: one read of the row and the column of each token.
        """
        label, count = np.full(self.shape, -1), 0
        rules = list({id(layer): layer for layer in self._layers}.values())
        for item, own in enumerate(label):
            for position in range(len(own)):
                fresh = np.arange(len(own)) == position if own[position] < 0 else np.zeros(0, dtype=bool)
                count += int(fresh.any())
                while fresh.any():
                    own[fresh] = count - 1
                    near = [step(rule[item].numpy(), fresh) for rule in rules for step in (_rows_of, _keys_of)]
                    fresh = np.logical_or.reduce(near) & (own < 0)
        return torch.from_numpy(label), count


_Bools = NDArray[np.bool_]


def _materialised(rule: Mask, batch: int, length: int) -> Tensor:
    """Return the pairs that a layer's rule allows in any head, bool ``[batch, length, length]``.

    If the rule is the same for all batch items, the batch items share memory.
    """
    items, heads = batch if rule.shape[0] > 1 else 1, rule.shape[1]
    allowed = torch.empty(items, length, length, dtype=torch.bool)
    for start in range(0, length, _BLOCK):
        rows = range(start, min(start + _BLOCK, length))
        part = rule.to_dense(len(rows), length, batch=items, heads=heads, q_positions=rows)
        allowed[:, start : start + _BLOCK] = part.any(1)
    return allowed.expand(batch, -1, -1)


def _with_other_modules(rule: Tensor, beside: Sequence[Tensor]) -> Tensor:
    """Compose a layer's rule with the pairs that its other modules connect before or after the rule."""
    itself = torch.eye(rule.shape[-1], dtype=torch.bool)
    whole = rule
    for pairs in beside:
        near = (pairs | itself).float()
        whole = near @ (whole | itself).float() @ near > 0
    return whole


def _propagated(tokens: Tensor, layers: Iterable[Tensor], step: Callable[[_Bools, _Bools], _Bools]) -> Tensor:
    """Add the tokens reached through each layer to a set; residual connections keep the earlier tokens in the set."""
    settled = None
    for layer in layers:
        if layer is settled:
            continue
        near = [step(rule.numpy(), own.numpy()) for rule, own in zip(layer, tokens, strict=True)]
        reached = tokens | torch.from_numpy(np.stack(near))
        tokens, settled = reached, layer if torch.equal(reached, tokens) else None
    return tokens


def _rows_of(rule: _Bools, keys: _Bools) -> _Bools:
    """Return the rows that may attend to any of the keys under a rule, bool ``[length]``, without copying the rule."""
    if np.count_nonzero(keys) < _BLOCK:
        return np.asarray(rule[:, keys].any(1))
    return np.concatenate([(rule[start : start + _BLOCK] & keys).any(1) for start in range(0, len(rule), _BLOCK)])


def _keys_of(rule: _Bools, rows: _Bools) -> _Bools:
    """Return the keys that any of the rows may attend to under a rule, bool ``[length]``."""
    keys, positions = np.zeros(rule.shape[1], dtype=bool), np.flatnonzero(rows)
    for start in range(0, len(positions), _BLOCK):
        keys |= rule[positions[start : start + _BLOCK]].any(0)
    return keys
