"""Tests of the containment of NaN and inf: which results of a kernel are kept, and which gradients flow back."""

import math

import pytest
import torch

import saccade as sc
from saccade import masks, scores
from saccade.engine import nonfinite
from saccade.engine.kernels.kernel import Kernel

KERNELS = pytest.mark.parametrize("impl", ["tiled", "fused", "reference"])


class Prepared(Kernel):
    """A kernel that returns given results."""

    name = "prepared"
    supports_masked_rows = False

    def __init__(self, out, lse):
        self.results = out, lse

    def forward(self, given, value, dropped):
        return self.results


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("is_spoilt", [False, True])
@pytest.mark.parametrize("mask", [None, masks.Causal()], ids=str)
def test_results_stand_unless_nan_could_flow_back_to_what_is_hidden(mask, is_spoilt, is_recorded):
    query, out = torch.randn(2, 1, 1, 3, 2)
    if is_spoilt:
        out[0, 0, 2, 0] = math.nan
    out.requires_grad_(is_recorded)
    given = sc.AttentionMatrix(query, query, mask).inputs
    found = nonfinite.forward_if_clean(Prepared(out, None), given, query)
    assert (found is None) == (is_recorded and is_spoilt and mask is not None)
    assert found is None or (found[0] is out and found[1] is None)


@pytest.mark.parametrize("mask", [None, masks.Causal()], ids=str)
def test_gradients_of_rows_that_see_nothing_are_zero(mask):
    query, out = torch.randn(2, 1, 1, 3, 2)
    out[0, 0, 0] = 0.0
    lse = torch.tensor([[[-math.inf, 0.5, 1.0]]])
    given = sc.AttentionMatrix(query, query, mask).inputs
    found = nonfinite.forward_if_clean(Prepared(out.requires_grad_(), lse.requires_grad_()), given, query)
    assert found is not None
    assert torch.equal(found[0], out)
    assert torch.equal(found[1], lse)
    gradients = torch.autograd.grad(found, (out, lse), [torch.full_like(x, math.nan) for x in found])
    reached = torch.tensor([mask is None, True, True])
    assert torch.equal(gradients[0].isnan().all(-1)[0, 0], reached)
    assert torch.equal(gradients[1].isnan()[0, 0], reached)
    assert not gradients[0][0, 0, ~reached].any()


def inputs():
    return [torch.randn(1, heads, 12, 4, dtype=torch.float64) for heads in (4, 2, 2)]


def gradients_of(tensors, mask, rows, impl, upstream=1.0, **options):
    """Return the results and the gradients of some of their rows."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, lse = sc.attention_with_lse(*leaves, mask, impl=impl, **options)
    of_out = torch.where(rows[:, None], upstream, 0.0).expand_as(out).contiguous()
    of_lse = torch.where(rows & (lse.detach() != -math.inf), upstream, 0.0)
    return out.detach(), lse.detach(), torch.autograd.grad((out, lse), leaves, (of_out, of_lse))


@KERNELS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_query_that_sees_nothing_moves_nothing(bad, impl):
    allowed = torch.ones(12, 12, dtype=torch.bool).tril()
    allowed[7] = False
    tensors, rows = inputs(), torch.ones(12, dtype=torch.bool)
    want = gradients_of(tensors, allowed, rows, impl)
    tensors[0][:, :, 7] = bad
    got = gradients_of(tensors, allowed, rows, impl)
    assert not got[0][:, :, 7].any()
    assert (got[1][:, :, 7] == -math.inf).all()
    torch.testing.assert_close(got, want)


@KERNELS
def test_a_row_that_its_bias_makes_nan_moves_no_key_that_it_may_not_see(impl):
    bias, tensors = torch.zeros(12, 12, dtype=torch.float64), inputs()
    rows = torch.arange(12) != 5
    *want, clean = gradients_of(tensors, masks.Causal(), rows, impl, bias=bias)
    bias[5, 2] = math.nan
    *got, found = gradients_of(tensors, masks.Causal(), rows, impl, bias=bias)
    for own, other in zip(got, want, strict=True):
        torch.testing.assert_close(own[:, :, rows], other[:, :, rows])
        assert own[:, :, 5].isnan().all()
    torch.testing.assert_close(found[0][:, :, rows], clean[0][:, :, rows])
    torch.testing.assert_close([x[:, :, 6:] for x in found[1:]], [x[:, :, 6:] for x in clean[1:]])


@KERNELS
def test_nothing_flows_back_from_rows_that_see_a_bad_key(impl):
    tensors = inputs()
    above, rows = torch.arange(12) < 8, torch.ones(12, dtype=torch.bool)
    _, _, want = gradients_of(tensors, masks.Causal(), above, impl, upstream=0.7)
    tensors[1][:, :, 8] = math.nan
    _, _, got = gradients_of(tensors, masks.Causal(), rows, impl, upstream=0.7)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", ["tiled", "reference"])
@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"score": scores.Additive(4, 4, 3).double()}, {"score": lambda x, b, h, q, kv: x.tanh()}],
    ids=["softcap", "additive", "function"],
)
def test_an_infinity_of_which_scores_make_a_number_is_seen_all_the_same(options, name, impl):
    tensors = [x.clone() for x in inputs()]
    want = sc.attention(*tensors, masks.Causal(), impl=impl, **options)
    tensors[["query", "key"].index(name)][:, :, 5, 1] = math.inf
    hit = torch.arange(12) >= 5 if name == "key" else torch.arange(12) == 5
    expected = want.masked_fill(hit[:, None], math.nan)
    out = sc.attention(*tensors, masks.Causal(), impl=impl, **options)
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_an_infinite_query_whose_scores_are_capped_moves_no_key(impl):
    tensors = inputs()
    rows = torch.arange(12) != 5
    _, _, want = gradients_of(tensors, masks.Causal(), rows, impl, softcap=2.0)
    tensors[0][:, :, 5, 1] = math.inf
    _, _, got = gradients_of(tensors, masks.Causal(), torch.ones(12, dtype=torch.bool), impl, softcap=2.0)
    torch.testing.assert_close(got[1:], want[1:])
    torch.testing.assert_close(got[0][:, :, rows], want[0][:, :, rows])


@KERNELS
def test_nan_is_seen_by_some_heads_and_items_and_not_by_others(impl, monkeypatch):
    monkeypatch.setattr(nonfinite, "_PAIRS_AT_ONCE", 40)
    allowed = torch.rand(2, 4, 12, 12, generator=torch.Generator().manual_seed(2)) < 0.3
    tensors = [torch.randn(2, heads, 12, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    want = sc.attention(*tensors, allowed, impl=impl)
    tensors[1][1, 1, 4] = tensors[2][0, 1, 9] = tensors[2][1, 0, 2] = math.nan
    hit = torch.zeros(2, 4, 12, dtype=torch.bool)
    for item, group, column in ((1, 1, 4), (0, 1, 9), (1, 0, 2)):
        heads = slice(2 * group, 2 * group + 2)
        hit[item, heads] |= allowed[item, heads, :, column]
    out = sc.attention(*tensors, allowed, impl=impl)
    torch.testing.assert_close(out, want.masked_fill(hit[..., None], math.nan), equal_nan=True)


def test_only_nonfinite_columns_of_a_long_matrix_are_checked(monkeypatch):
    mask = torch.ones(12, 12, dtype=torch.bool)
    mask[3, 5] = False
    query, key, value = inputs()
    key[:, :, [1, 2, 9]], value[:, :, 4] = math.nan, math.inf
    looked, scores_of = [], nonfinite.scores_of

    def seen(given, tile):
        looked.extend(tile.spans)
        return scores_of(given, tile)

    monkeypatch.setattr(nonfinite, "scores_of", seen)
    given = sc.AttentionMatrix(query, key, mask).inputs
    assert len(list(given.row_plan.tiles)) == 1
    sanitized = nonfinite.sanitize(given, value)
    assert looked == [range(1, 3), range(4, 5), range(9, 10)]
    assert sanitized.nan_scores.all()


def test_hidden_pairs_can_be_computed_pair_by_pair():
    query, key, value = inputs()
    query[0, 1, 3], key[0, 1, 5] = math.nan, math.inf
    given = sc.AttentionMatrix(query, key, masks.Causal()).inputs
    sanitized = nonfinite.sanitize(given, value)
    want = torch.zeros(1, 4, 12, 12)
    want[0, 1, 3] = want[0, 2:, :, 5] = -math.inf
    places = torch.arange(4)[:, None, None], torch.arange(12)[:, None], torch.arange(12)
    assert torch.equal(sanitized.inputs.bias.at(torch.tensor(0), *places), want[0].double())


def test_rows_beside_one_that_its_bias_makes_nan_drop_the_same_weights():
    query, key, value = inputs()
    bias = torch.zeros(12, 12, dtype=torch.float64)
    found = []
    for nan_rows in (0.0, math.nan):
        bias[5, 2] = nan_rows
        matrix = sc.AttentionMatrix(query.requires_grad_(), key, masks.Causal(), bias=bias, impl="reference")
        found.append(matrix.matmul(value, dropout_p=0.4, seed=3).detach())
    rows = torch.arange(12) != 5
    torch.testing.assert_close(found[1][:, :, rows], found[0][:, :, rows])
    assert found[1][:, :, 5].isnan().all()


@KERNELS
@pytest.mark.parametrize("places", [[9], [1, 2, 9], [2, 9, 10]])
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("kind", ["texts", "table", "strides"])
def test_nan_stands_where_it_may_be_seen_and_nowhere_else(kind, name, places, impl):
    if kind == "table":
        mask = torch.rand(12, 12, generator=torch.Generator().manual_seed(2)) < 0.3
        mask[9] = False
    else:
        mask = masks.Strided(5) if kind == "strides" else masks.Documents([4, 3, 5], rule=masks.Causal())
    allowed = mask if kind == "table" else mask.to_dense(12)[0, 0]
    tensors = inputs()
    want, want_lse = sc.attention_with_lse(*tensors, mask, impl=impl)
    tensors[["query", "key", "value"].index(name)][:, :, places] = math.nan
    out, lse = sc.attention_with_lse(*tensors, mask, impl=impl)
    hit = allowed[:, places].any(1)
    if name == "query":
        hit = allowed.any(1) & torch.isin(torch.arange(12), torch.tensor(places))
    torch.testing.assert_close(out, want.masked_fill(hit[:, None], math.nan), equal_nan=True)
    hit &= torch.tensor(name != "value")
    torch.testing.assert_close(lse, want_lse.masked_fill(hit, math.nan), equal_nan=True)
