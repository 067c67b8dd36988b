"""The axes of a lazy tensor. Each axis is a product of factors (sub-axes), which views and transpositions regroup."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

Axis = tuple[int, ...]
"""The factors of one tensor axis, slowest first. An axis of size 1 has no factors, except for a single query or key."""

_names = itertools.count()


def new_factor() -> int:
    """Return a unique integer that identifies a new factor of an axis."""
    return next(_names)


@dataclass(frozen=True)
class Axes:
    """The visible axes of a tensor, each a product of factors: sub-axes of fixed size.

    ``view(batch, heads, n, m)`` of a tensor ``[batch * heads, n, m]`` splits a factor; a transposition permutes axes.
    The operands of a lazy tensor have one dimension per factor, so a view changes them only if it splits a factor.

    Args:
        sizes: the size of each factor: at least 2, or 1 for a single query or key.
        axes: the factors of each visible axis.
    """

    sizes: Mapping[int, int]
    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the lazy tensor, as the model sees it."""
        return tuple(math.prod(self.sizes[factor] for factor in axis) for axis in self.axes)

    def view(self, shape: Sequence[int]) -> tuple[Axes, dict[int, Axis]] | None:
        """Return the axes after ``view(shape)`` and the parts of each split factor; None if the view mixes factors."""
        sizes, splits, axes = dict(self.sizes), dict[int, Axis](), list[list[int]]()
        factors = [factor for axis in self.axes for factor in axis][::-1]
        if math.prod(shape) != math.prod(self.shape):
            return None
        start = 0
        for size in shape:
            axis, rest = list[int](), size
            if size > 1:
                _place_single(factors, sizes, axes, start)
                start = len(axes) + 1
            while rest > 1:
                factor = factors.pop()
                factor_size = sizes[factor]
                if factor_size > rest and factor_size % rest == 0:
                    first, second = new_factor(), new_factor()
                    sizes[first], sizes[second], splits[factor] = rest, factor_size // rest, (first, second)
                    factors.append(second)
                    factor, factor_size = first, rest
                if rest % factor_size:
                    return None
                axis.append(factor)
                rest //= factor_size
            axes.append(axis)
        _place_single(factors, sizes, axes, start)
        whole = {factor: _leaves(factor, splits) for factor in splits if factor in self.sizes}
        return Axes(sizes, tuple(map(tuple, axes))), whole

    def permuted(self, order: Sequence[int]) -> Axes:
        """Return the axes of the lazy tensor after ``permute(order)``."""
        return Axes(self.sizes, tuple(self.axes[axis] for axis in order))

    def broadcasts(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor with the given shape broadcasts to the lazy tensor without enlarging it."""
        visible_shape = self.shape
        sizes = zip(reversed(shape), reversed(visible_shape), strict=False)
        return len(shape) <= len(visible_shape) and all(size in (1, visible) for size, visible in sizes)

    def by_factor(self, x: Tensor, factors: Sequence[int]) -> Tensor:
        """Give a tensor that broadcasts to the lazy tensor one dimension for each factor, of full size or size 1."""
        x = x[(None,) * (len(self.axes) - x.dim())]
        return split_axes(x, self.axes, self.sizes, factors)


def _place_single(factors: list[int], sizes: Mapping[int, int], axes: list[list[int]], start: int) -> None:
    """Pop the next factors of size 1, and assign them to the trailing axes, which also have size 1.

    Args:
        factors: the remaining factors, in reverse order.
        sizes: the size of each factor.
        axes: the factors of the axes so far.
        start: index of the first trailing axis of size 1. Any further factors join the axis before it.
    """
    single = list[int]()
    while factors and sizes[factors[-1]] == 1:
        single.append(factors.pop())
    for axis in reversed(axes[start:]):
        if single:
            axis.append(single.pop())
    if single and start:
        axes[start - 1] += single


def split_axes(x: Tensor, axes: Sequence[Axis], sizes: Mapping[int, int], factors: Sequence[int]) -> Tensor:
    """Split each dimension of a tensor into the factors of its axis, and permute them to the order of ``factors``.

    A dimension of size 1 becomes dimensions of size 1.
    """
    split, names = list[int](), list[int]()
    for size, axis in zip(x.shape, axes, strict=False):
        split += [1 if size == 1 else sizes[factor] for factor in axis]
        names += axis
    missing = [factor for factor in factors if factor not in names]
    x = x.reshape(*split, *(1 for _ in missing), *x.shape[len(axes) :])
    names += missing
    tail = range(len(names), x.dim())
    return x.permute(*(names.index(factor) for factor in factors), *tail)


def renamed(factors: Iterable[int], splits: Mapping[int, Axis]) -> Axis:
    """Return the factors of an axis, with each split factor replaced by its parts."""
    return tuple(part for factor in factors for part in splits.get(factor, (factor,)))


def _leaves(factor: int, splits: Mapping[int, Axis]) -> Axis:
    if factor not in splits:
        return (factor,)
    return tuple(leaf for part in splits[factor] for leaf in _leaves(part, splits))
