"""Costs against length: what a figure of them draws."""

import numpy as np
import pytest

import saccade as sc
from saccade import masks
from saccade.costs import Machine, growth

LENGTHS = (256, 1024, 4096)


@pytest.fixture(scope="module")
def costs():
    return [sc.cost(masks.sliding_window(64), n, num_heads=2, head_dim=16) for n in LENGTHS]


def drawn(figure):
    """The lines of a figure, by name, as ``(x, y)``."""
    axes = figure.axes[0]
    return axes, {line.get_label(): line.get_data() for line in axes.get_lines()}


def test_memory_with_the_room_that_there_is(costs):
    axes, lines = drawn(growth(reversed(costs), memory=3 * 2**20))
    assert list(lines) == ["forward", "training", "decode", "cache", "available"]
    assert axes.get_ylabel() == "MiB"
    for name in ("forward", "training", "decode"):
        x, y = lines[name]
        assert x.tolist() == list(LENGTHS)
        np.testing.assert_allclose(y * 2**20, [getattr(told, name).peak_bytes for told in costs])
    np.testing.assert_allclose(lines["cache"][1] * 2**20, [told.cache_bytes for told in costs])
    assert lines["available"][1].tolist() == [3.0] * 3


@pytest.mark.parametrize(("what", "attribute", "unit"), [("flops", "flops", 1e6), ("moved", "bytes_moved", 2**20)])
def test_flops_and_bytes(costs, what, attribute, unit):
    _, lines = drawn(growth(costs, what))
    assert list(lines) == ["forward", "training", "decode"]
    np.testing.assert_allclose(lines["training"][1] * unit, [getattr(told.training, attribute) for told in costs])


def test_seconds_are_those_of_this_machine(costs, monkeypatch):
    monkeypatch.setattr(Machine, "seconds", lambda self, steps: 1e-3 * len(steps))
    axes, lines = drawn(growth(costs, "seconds"))
    assert axes.get_ylabel() == "milliseconds"
    assert lines["forward"][1].tolist() == [len(told.forward.steps) for told in costs]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda costs: costs[:1], {}, "growth: costs must contain at least two lengths, each once; got \\[256\\]"),
        (lambda costs: [*costs, costs[0]], {}, "each once"),
        (lambda costs: [costs[0], sc.cost(masks.Causal(), 512)], {}, "the same subject, batch and dtype"),
        (lambda costs: costs, {"what": "money"}, "growth: what must be one of memory, flops, moved, seconds"),
        (lambda costs: costs, {"memory": 0}, "growth: memory must be a positive number of bytes"),
        (lambda costs: costs, {"what": "flops", "memory": 5}, 'used with what="memory"'),
        (lambda costs: [3, 4], {}, "growth: costs must contain results of saccade.cost"),
    ],
)
def test_refused_figures(costs, change, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        growth(change(costs), **options)
