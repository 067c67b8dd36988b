"""Roles: which axes of attention weights are batch, heads, queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from saccade.fusion.axes import Axis
from saccade.fusion.scores import Scores

HIDDEN = -9990.0
"""Lower numbers mask a pair: -1e4, -1e9, the lowest number of the dtype."""


class Roles(NamedTuple):
    """The role that each factor (sub-axis) of the weights has in an attention call; see `saccade.fusion.axes.Axes`.

    Args:
        items: the factors of the batch.
        heads: the factors of the key heads.
        groups: the factors of the query heads that share a key head.
        rows, columns: the factors of the query positions and of the key positions.
        sizes: the size of each factor.
    """

    items: Axis
    heads: Axis
    groups: Axis
    rows: Axis
    columns: Axis
    sizes: Mapping[int, int]

    @property
    def batch(self) -> Axis:
        """The factors of the batch and of the key heads, which queries, keys and values share."""
        return (*self.items, *self.heads)

    @property
    def dimensions(self) -> tuple[Axis, Axis, Axis, Axis]:
        """The factors (sub-axes) that form the four dimensions of an attention call: batch, heads, queries and keys."""
        return self.items, (*self.heads, *self.groups), self.rows, self.columns

    def length(self, factors: Axis) -> int:
        """Return the product of the sizes of the given factors."""
        return math.prod(self.sizes[x] for x in factors)

    def to_four_dims(self, x: Tensor, factors: Axis) -> Tensor:
        """Reshape a mask or bias from one dimension per factor to four dimensions, each of full size or size 1."""
        x = x.permute([factors.index(x) for dimension in self.dimensions for x in dimension])
        sizes, shape = list[int](), list[int]()
        for dimension in self.dimensions:
            current = x.shape[len(sizes) : len(sizes) + len(dimension)]
            full = [self.sizes[factor] for factor in dimension] if any(size > 1 for size in current) else list(current)
            sizes += full
            shape.append(math.prod(full))
        return x.expand(sizes).reshape(shape)


def roles_of(weights: Scores, columns: Axis, of_values: set[int]) -> Roles | None:
    """Return the role of each factor in an attention call, or None if the values depend on the query."""
    is_left = set(columns) <= set(weights.left_only)
    keys, queries = (weights.left_only, weights.right_only)[:: 1 if is_left else -1]
    rows = _rows(weights, columns, queries, of_values)
    if of_values & set(rows):
        return None
    separate = {*weights.batch, *keys, *(of_values & set(queries))} - set(columns)
    visible = [factor for axis in weights.axes.axes for factor in axis]
    batch = tuple(x for x in visible if x in separate)
    groups = tuple(x for x in visible if x in queries and x not in (*rows, *batch))
    # By default, the last axis before queries and keys is the head axis: ``[batch, windows, heads, q_len, kv_len]``.
    last = batch[-1:] if len(batch) > 1 else ()
    heads = last if weights.heads is None else tuple(x for x in batch if x not in _items(weights))
    items = tuple(x for x in batch if x not in heads)
    return Roles(items, heads, groups, rows, columns, weights.axes.sizes)


def _items(weights: Scores) -> Axis:
    """Return the factors that query and key share, except those of the heads; they form the batch axis."""
    return tuple(x for x in weights.batch if x not in (weights.heads or ()))


def _rows(weights: Scores, columns: Axis, queries: Axis, of_values: set[int]) -> Axis:
    """Return the factors (sub-axes) of the query axis.

    If the masked pairs differ along exactly one of the queries' axes, this is the query axis; otherwise the one along
    which masks and biases vary; otherwise the one nearest to the keys.
    """
    visible, every = weights.axes.axes, weights.all_factors
    possible = [axis for axis in visible if axis and set(axis) <= set(queries)]
    masked = [
        axis for axis in possible if len(possible) > 1 and not set(axis) & of_values and _is_masked_along(weights, axis)
    ]
    candidates = [axis for axis in possible if not set(axis) & set(weights.lead)]
    tensors = [x.tensor for x in weights.terms] + [x.pairs for x in weights.fills] + [*weights.zeros]
    varying = [axis for axis in candidates if any(x.shape[every.index(factor)] > 1 for x in tensors for factor in axis)]
    candidates = masked if len(masked) == 1 else varying if len(varying) == 1 else candidates
    position = visible.index(columns) if columns in visible else len(visible)
    rows = min(candidates, key=lambda axis: abs(visible.index(axis) - position), default=())
    # The model may have merged heads into the rows.
    return tuple(factor for factor in rows if any(x.shape[every.index(factor)] > 1 for x in tensors)) or rows


def _is_masked_along(weights: Scores, axis: Axis) -> bool:
    """Return whether the masked pairs differ along an axis. Numbers of a bias, such as those of ALiBi, mask no pair."""
    masks = [x.pairs for x in weights.fills] + [*weights.zeros]
    masks += [x.tensor.detach() * x.scale <= HIDDEN for x in weights.terms]
    dims = [weights.all_factors.index(factor) for factor in axis]
    return any(x.shape[dim] > 1 and bool((x != x.narrow(dim, 0, 1)).any()) for x in masks for dim in dims)
