"""Axes regroup as torch's views do."""

import itertools
import math
import random

import torch

from saccade.fusion.axes import Axes, new_factor, split_axes


def axes_of(shape):
    factors = [(new_factor(),) if size > 1 else () for size in shape]
    return Axes({axis[0]: size for axis, size in zip(factors, shape, strict=True) if axis}, tuple(factors))


def some_shape(size, draw):
    """A shape of ``size`` elements, with ones between."""
    shape = []
    while size > 1:
        part = draw.choice([x for x in range(2, size + 1) if size % x == 0])
        shape += [part, *[1] * (draw.random() < 0.3)]
        size //= part
    return shape or [1]


def test_views_and_transpositions_are_those_of_torch():
    draw = random.Random(0)
    followed = 0
    for _ in range(300):
        axes = axes_of(some_shape(draw.choice([12, 24, 36]), draw))
        x = torch.arange(math.prod(axes.shape)).view(axes.shape)
        first, start = axes, dict(axes.sizes)
        for _ in range(4):
            if draw.random() < 0.5:
                order = draw.sample(range(x.dim()), x.dim())
                axes, x = axes.permuted(order), x.permute(order)
                continue
            shape = some_shape(x.numel(), draw)
            viewed = axes.view(shape)
            if viewed is None:
                break
            axes, x = viewed[0], x.reshape(shape)
            followed += 1
        assert axes.shape == x.shape
        # The first tensor, split into the factors of the last axes and permuted, is the last tensor.
        whole = [factor for axis in first.axes for factor in axis]
        parts = {factor: [f for f in axes.sizes if f in _parts(factor, first, axes, start)] for factor in whole}
        factors = [factor for axis in axes.axes for factor in axis]
        if all(len(part) == 1 for part in parts.values()) and set(factors) == set(whole):
            y = torch.arange(x.numel()).view([start[factor] for factor in whole])
            assert torch.equal(y.permute([whole.index(factor) for factor in factors]).reshape(x.shape), x)
    assert followed > 200


def _parts(factor, first, last, sizes):
    return {factor} if factor in {f for axis in last.axes for f in axis} else set()


def test_a_split_and_its_parts():
    axes = axes_of((6, 4))
    viewed, splits = axes.view((2, 3, 2, 2))
    (six,), (four,) = axes.axes
    assert set(splits) == {six, four}
    assert [viewed.sizes[factor] for factor in (*splits[six], *splits[four])] == [2, 3, 2, 2]


def test_views_that_mix_factors():
    assert axes_of((6, 4)).view((4, 6)) is None
    assert axes_of((2, 3)).view((3, 2)) is None
    assert axes_of((2, 3)).permuted((1, 0)).view((6,)) is not None
    assert axes_of((2, 3)).view((7,)) is None


def test_broadcasting():
    axes = axes_of((2, 1, 3))
    assert all(axes.broadcasts(shape) for shape in itertools.product((1, 2), (1,), (1, 3)))
    assert axes.broadcasts(())
    assert not any(axes.broadcasts(shape) for shape in ((2, 2, 3), (1, 2, 1, 3), (2,)))


def test_one_dimension_for_each_factor():
    axes = axes_of((2, 6))
    viewed, splits = axes.view((2, 3, 2))
    (two,), (six,) = axes.axes
    x = torch.randn(2, 6)
    three, last = splits[six]
    expected = x.view(2, 3, 2).permute(2, 0, 1)
    assert torch.equal(split_axes(x, [(two,), (three, last)], viewed.sizes, [last, two, three]), expected)
    assert viewed.by_factor(x[:1, None, :1], [last, two, three]).shape == (1, 1, 1)
