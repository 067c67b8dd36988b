"""The file of a page holds the numbers of the dense matrix, for every kind of layer."""

from functools import cache

import numpy as np
import pytest
from tests.viz.page.layer_kinds import CASES
from tests.viz.page.page_reader import pooled, written

import saccade as sc

FIRST = ("causal", "delta", "written")  # the other cases are read of the second batch item only


@cache
def case_of(name):
    return CASES[name]()


@pytest.fixture(scope="module", params=[*((name, 1) for name in CASES), *((name, 0) for name in FIRST)], ids=str)
def shown(request, tmp_path_factory):
    """Return a case, one of its batch items, and its page."""
    (name, item), folder = request.param, tmp_path_factory.mktemp("pages")
    return case_of(name), item, written(folder, case_of(name).given, batch=item, size=100_000_000)


def is_close(found, expected, top, *, is_signed):
    """Check that numbers are at most a step of the scale too large: 6 %, or 12 % if signed; tiny ones may be 0."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    slack = 10 ** (6 / (126 if is_signed else 253)) - 1 + 1e-3
    np.testing.assert_allclose(found, expected, rtol=slack, atol=2e-6 * top)
    known = ~np.isnan(found)
    assert (np.abs(found[known]) >= np.abs(expected[known]) * (1 - 1e-5) - 1.001e-6 * top).all()


def strongest(lines, k):
    """Return the k weights of every line that are farthest from 0, without their signs."""
    return -np.sort(-np.abs(lines), -1)[:, :k]


def check_strongest(found, lines, k):
    """Check that weights and places are those farthest from 0, and no others."""
    weights, places = found
    order = np.argsort(-np.abs(weights), -1, kind="stable")
    weights, places = (np.take_along_axis(one, order, -1) for one in (weights, places))
    top = np.abs(lines).max()
    np.testing.assert_allclose(np.abs(weights), strongest(lines, k), rtol=1e-3, atol=1e-7 * top)
    for line, own, names in zip(lines, weights, places, strict=True):
        there = names >= 0
        assert len(set(names[there])) == there.sum()
        np.testing.assert_allclose(line[names[there].astype(int)], own[there], rtol=1e-3, atol=1e-7 * top)
        assert not own[~there].any()


@pytest.mark.ci
def test_small_maps(shown):
    case, item, page = shown
    layer = page.layer()
    assert layer["signed"] == case.is_signed
    for head in range(case.dense.shape[1]):
        cells, _ = page.small(0, head)
        weights, allowed = case.dense[item, head], case.allowed[item, head]
        expected = pooled(weights, allowed, 128)
        assert cells.shape == tuple(min(128, n) for n in weights.shape)
        is_close(cells, expected, np.nanmax(np.abs(expected)), is_signed=case.is_signed)


def test_columns_without_sinks(shown):
    case, item, page = shown
    layer = page.layer()
    received = case.dense[item].sum(1).mean(0)
    share = received / max(received.sum(), 1e-30)
    least = max(0.05, 4.0 / len(share))
    assert set(layer["sinks"]) <= set(np.flatnonzero(share >= 0.999 * least))
    assert len(layer["sinks"]) == min(8, (share >= least).sum())
    for head in range(case.dense.shape[1]):
        weights, allowed = case.dense[item, head], case.allowed[item, head]
        close = page.close(0, head)
        for bins, columns, beside in (
            (128, layer["sinkColumns"], page.small(0, head)[1]),
            (1024, layer["close"][str(head)].get("sinkColumns", []), close.beside),
        ):
            if columns:
                expected = np.nan_to_num(pooled(weights, allowed, bins, without=layer["sinks"])[:, columns])
                top = np.abs(weights).max()
                is_close(beside, expected, top, is_signed=case.is_signed)


def test_cases_have_sinks(tmp_path):
    for name, sinks in (("sink", [0]), ("sink-short", [0]), ("signed-sink", [5])):
        assert written(tmp_path, case_of(name).given, batch=1).layer()["sinks"] == sinks, name


def test_large_maps(shown):
    case, item, page = shown
    for head in range(case.dense.shape[1]):
        weights, allowed = case.dense[item, head], case.allowed[item, head]
        cells = page.close(0, head).map
        if max(weights.shape) <= 128:
            assert cells is None  # the small map is whole
        else:
            expected = pooled(weights, allowed, 1024)
            is_close(cells, expected, np.nanmax(np.abs(expected)), is_signed=case.is_signed)


@pytest.mark.ci
def test_strongest_weights(shown):
    case, item, page = shown
    for head in range(case.dense.shape[1]):
        weights = case.dense[item, head].astype(float)
        close, told = page.close(0, head), page.layer()["close"][str(head)]
        assert 8 <= told["k"] <= 64 or told["k"] == weights.shape[1]
        check_strongest(close.rows, weights, min(told["k"], weights.shape[1]))
        of_keys = np.pad(weights.T, [(0, 0), (0, max(0, told["back"] - weights.shape[0]))])
        check_strongest(close.columns, of_keys, told["back"])


def test_received(shown):
    case, item, page = shown
    for head in range(case.dense.shape[1]):
        received = case.dense[item, head].astype(float).sum(0)
        np.testing.assert_allclose(page.close(0, head).received, received, rtol=2e-3, atol=1e-6 * received.max())


def largest_of(case, item):
    """Return the mean of each query's largest weight; for distributions, only over queries that see a key."""
    largest = case.dense[item].max(-1)
    is_sum = np.abs(case.dense[item].sum(-1) - 1) < 0.01
    if (is_sum | (largest == 0)).all() and not case.is_signed:
        return np.array([one[one > 0].mean() for one in largest])
    return largest.clip(0).mean(-1)


def test_measures(shown):
    case, item, page = shown
    layer, matrix = page.layer(), case.given
    np.testing.assert_allclose(layer["values"]["largest_weight"], largest_of(case, item), rtol=1e-3)
    told = matrix.summary().measures if isinstance(matrix, sc.Matrix) and not case.is_signed else ()
    for measure in told:
        for kind, values in (("values", measure.values), ("uniform", measure.uniform)):
            found = np.array(layer[kind][measure.name], float)
            np.testing.assert_allclose(found, values[item].double().numpy(), rtol=1e-5, atol=1e-9)
    assert {one["name"] for one in page.side()["measures"]} == set(layer["values"])
    assert set(layer["values"]) >= {"largest_weight", "previous_mass", *(measure.name for measure in told)}


def test_all_weights_of_a_short_text(shown):
    case, _, page = shown
    q_len, kv_len = case.dense.shape[2:]
    for told in page.layer()["close"].values():
        assert told["k"] == kv_len if max(q_len, kv_len) < 300 else 64 <= told["k"] <= kv_len
