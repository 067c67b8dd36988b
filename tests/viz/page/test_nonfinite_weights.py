"""Weights that are broken in part are shown where they are whole; texts that repeat have induction."""

import math

import numpy as np
import pytest
import torch
from tests.viz.page.layer_kinds import attention, random_weights
from tests.viz.page.page_reader import written

from saccade import masks


@pytest.fixture
def weights():
    made = random_weights(1, 3, 40, 40).tril()
    made[..., 0] += 1 - made.sum(-1)
    return made


def same(one, other, layer, head):
    for name in ("values", "uniform"):
        for measure, numbers in one.layer(layer)[name].items():
            assert numbers[head] == other.layer(layer)[name][measure][head], measure
    np.testing.assert_array_equal(one.small(layer, head)[0], other.small(layer, head)[0])
    for own, their in ((one.close(layer, head), other.close(layer, head)),):
        np.testing.assert_array_equal(own.received, their.received)
        for mine, yours in zip((*own.rows, *own.columns), (*their.rows, *their.columns), strict=True):
            np.testing.assert_array_equal(mine, yours)


@pytest.mark.parametrize("is_weights", [True, False])
def test_a_head_of_nan_spoils_no_other(weights, tmp_path, is_weights):
    clean = broken = attention(40, 40, masks.Causal(), heads=3, kv_heads=1)
    if is_weights:
        clean, broken = weights, weights.clone()
        broken[:, 1] = math.nan
    else:
        query = clean.inputs.query.clone()
        query[:, 1] = math.nan
        broken = type(clean)(query, clean.inputs.key, masks.Causal())
    whole, page = (written(tmp_path, given) for given in (clean, broken))
    assert not page.layer()["signed"]
    for head in (0, 2):
        same(whole, page, 0, head)
    cells, _ = page.small(0, 1)
    assert np.isnan(cells).all()
    assert page.layer()["values"]["largest_weight"][1] is None
    close = page.close(0, 1)
    assert not close.rows[0].any()
    assert not close.received.any()


def test_sinks_are_found_beside_a_head_of_nan(tmp_path):
    given = torch.full((1, 3, 40, 40), 0.5 / 39)
    given[..., 7] = 0.5
    given[:, 2] = math.nan
    assert written(tmp_path, given).layer()["sinks"] == [7]


def test_a_query_of_nan_hides_no_other_query_from_keys(weights, tmp_path):
    broken = weights.clone()
    broken[0, 0, 5] = math.nan
    values, queries = written(tmp_path, broken, size=1, heads=[(0, 0)]).close(0, 0).columns
    kept = broken[0, 0].nan_to_num(0.0).numpy().T
    np.testing.assert_allclose(-np.sort(-values, -1), -np.sort(-kept, -1)[:, :8], rtol=1e-3, atol=1e-7)
    assert 5 not in queries


def test_infinite_weights_are_as_the_largest_that_is_finite(weights, tmp_path):
    broken = weights.clone()
    broken[0, 0, 9, 3] = math.inf
    page = written(tmp_path, broken)
    cells, _ = page.small(0, 0)
    assert cells[9, 3] == np.nanmax(cells) == pytest.approx(page.layer()["tops"][0])
    assert cells[10, 3] == pytest.approx(weights[0, 0, 10, 3].item(), rel=0.06)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_weights_of_any_size(tmp_path, scale):
    given = scale * torch.randn(1, 2, 9, 9, generator=torch.Generator().manual_seed(0)).double()
    page = written(tmp_path, given)
    for head in range(2):
        np.testing.assert_allclose(page.small(0, head)[0], given[0, head], rtol=0.12, atol=2e-6 * scale)
        rows = -np.sort(-np.abs(given[0, head].numpy()), -1)
        np.testing.assert_allclose(np.sort(-np.abs(page.close(0, head).rows[0]), -1), -rows, rtol=1e-3)


def test_nothing_at_all_is_a_page(tmp_path):
    page = written(tmp_path, torch.zeros(1, 1, 4, 4))
    assert np.isnan(page.small(0, 0)[0]).all()
    assert page.close(0, 0).rows[1].max() == -1


def test_induction_is_shown_for_repeated_tokens(tmp_path):
    x = torch.zeros(1, 1, 5, 4)
    matrix = type(attention(3, 3))(x, x, masks.Causal())
    told = written(tmp_path, matrix, tokens=["the", "cat", "sat", "the", "cat"]).layer()
    assert told["values"]["induction_mass"] == pytest.approx([(0.25 + 0.2) / 5])
    for tokens in (None, list("abcde"), (list("aabbc"), list("aabbd"))):
        assert "induction_mass" not in written(tmp_path, matrix, tokens=tokens).layer()["values"]


def test_texts_of_a_cache_begin_where_queries_stand(tmp_path):
    page = written(tmp_path, attention(3, 5), tokens=list("abcde"))
    assert page.layer()["first"] == 2
    assert page.tokens() == (list("cde"), list("abcde"))
    page = written(tmp_path, attention(5, 3))
    assert page.tokens() == (list("01234"), list("012"))
    assert len(page.side()["texts"]) == 2


def test_layers_of_lists_and_dicts_have_names(tmp_path):
    one, other = attention(5, 5), random_weights(2, 3, 4, 9)
    page = written(tmp_path, [one, other], tokens={"0": list("abcde"), "*": (list("wxyz"), list("123456789"))})
    assert [layer["name"] for layer in page.side()["layers"]] == ["0", "1"]
    assert page.tokens(1) == (list("wxyz"), list("123456789"))
    page = written(tmp_path, {"first": one, 7: other.numpy()})
    assert [(layer["name"], layer["heads"]) for layer in page.side()["layers"]] == [("first", 4), ("7", 3)]
