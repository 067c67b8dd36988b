"""The fused kernel is given shapes, layouts and numbers that the operation itself would not take."""

import pytest
import torch

import saccade as sc
from saccade import masks, positions
from saccade.engine.kernels.additive_masks import hidden_key
from saccade.plan import ColumnRange, Tile
from saccade.testing import oracle

NAMES = ["query", "key", "value"]


def inputs(*, value_dim=8, q_len=21, kv_len=21, dtype=torch.float64):
    sizes = [(2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, value_dim)]
    return [torch.randn(size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def check(tensors, mask, dtype=None, **options):
    """Results and gradients, those through the lse too, are the definition's."""
    query, key, _ = tensors
    allowed = mask.to_dense(query.shape[2], key.shape[2], batch=2, heads=4)
    ours = sc.attention_with_lse(*tensors, mask, impl="fused", **options)
    theirs = oracle.attention(*tensors, allowed, **options)
    torch.testing.assert_close(ours, theirs)
    sees = allowed.any(-1)
    totals = [(out.sin().sum() + lse[sees].sin().sum()) for out, lse in (ours, theirs)]
    torch.testing.assert_close(*(torch.autograd.grad(total, tensors) for total in totals))


@pytest.mark.parametrize("value_dim", [1, 3, 8, 20])
@pytest.mark.parametrize("mask", [masks.Causal(), masks.Window(4, 2)], ids=str)
def test_gradients_through_the_lse_where_values_have_a_width_of_their_own(mask, value_dim):
    check(inputs(value_dim=value_dim), mask)


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("odd", [*NAMES, "query and key", "query and value", "key and value", "query, key and value"])
@pytest.mark.parametrize("layout", ["transposed", "spread"])
def test_some_inputs_with_another_stride(layout, odd, scale):
    tensors = inputs()
    for number, name in enumerate(NAMES):
        x = tensors[number].detach()
        if name in odd:
            view = x.mT.contiguous().mT if layout == "transposed" else x.repeat_interleave(2, 3)[..., ::2]
            tensors[number] = view.requires_grad_()
    check(tensors, masks.Causal(), scale=scale)


def heads_last(x):
    """The same numbers, those of all heads side by side in memory: what torch calls channels last."""
    return x.detach().permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


@pytest.mark.parametrize("value_dim", [3, 8, 20])
@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("mask", [masks.Causal(), masks.Window(4, 2)], ids=str)
def test_heads_that_stand_last_in_memory(mask, scale, value_dim):
    tensors = [heads_last(x).requires_grad_() for x in inputs(value_dim=value_dim)]
    check(tensors, mask, scale=scale)
    ours = sc.attention(*tensors, mask, scale=scale, impl="fused")
    theirs, _ = oracle.attention(*tensors, mask.to_dense(21, batch=2, heads=4), scale=scale)
    weights = heads_last(torch.randn_like(theirs))
    torch.testing.assert_close(*(torch.autograd.grad(out, tensors, weights) for out in (ours, theirs)))


@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), ~masks.Causal()], ids=str)
def test_inputs_and_values_without_width(mask, scale):
    query, key = torch.zeros(2, 4, 5, 0), torch.zeros(2, 2, 5, 0)
    out, lse = sc.attention_with_lse(query, key, key, mask, scale=scale, impl="fused")
    assert out.shape == (2, 4, 5, 0)
    torch.testing.assert_close(lse, mask.to_dense(5, batch=2, heads=4).sum(-1).log())


def test_a_last_row_that_sees_as_many_keys_as_they_are_wide():
    check(inputs(q_len=1), masks.Window(7, 0))


@pytest.mark.parametrize("value_dim", [3, 20])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive_where_values_have_a_width_of_their_own(scale, value_dim):
    check(inputs(value_dim=value_dim), masks.Causal(), scale=scale)


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Window(2, 1)], ids=str)
@pytest.mark.parametrize("kv_len", [2, 4, 6])
def test_more_rows_than_keys(kv_len, mask):
    check(inputs(q_len=9, kv_len=kv_len), mask)


def test_a_bias_is_not_rounded_to_half_precision():
    query, key, value = (x.detach() for x in inputs(dtype=torch.bfloat16))
    bias = 100 + torch.rand(4, 21, 21)
    for mask in (masks.Full(), masks.Causal()):
        want, _ = oracle.attention(query, key, value, mask.to_dense(21, batch=2, heads=4), bias=bias)
        out = sc.attention(query, key, value, mask, bias=bias, impl="fused")
        torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)


def test_gradients_of_a_row_in_several_tiles_are_summed_before_they_are_rounded(monkeypatch):
    """256 and twice 1 are 258, which half precision holds; but not 257, so that 256 and 1 would stay 256."""

    def backward(grad_out, q, k, v, *others):
        part = 256.0 if q.shape[2] == 40 else 1.0
        return torch.full_like(q, part), torch.zeros_like(k), torch.zeros_like(v)

    monkeypatch.setattr("saccade.engine.kernels.aten_flash.backward", backward)
    query, key, value = inputs(q_len=40, kv_len=40, dtype=torch.bfloat16)
    out = sc.attention(query, key, value, masks.Strided(3) | masks.Strided(5) | masks.Window(2, 2), impl="fused")
    (found,) = torch.autograd.grad(out.sum(), query)
    assert torch.equal(found, torch.full_like(query, 258.0))


@pytest.mark.parametrize("entries", [300, 600, 1000])
def test_tables_are_read_for_whole_groups_of_heads(entries, monkeypatch):
    monkeypatch.setattr("saccade.engine.kernels.fused_calls._READ_ROWS", 8)
    monkeypatch.setattr("saccade.engine.kernels.fused_calls._READ_ENTRIES", entries)
    tensors, bias = [x.detach() for x in inputs()], positions.ALiBi(4)
    found = [sc.attention(*tensors, masks.Causal(), bias=bias, impl=impl) for impl in ("fused", "reference")]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled"])
def test_a_rule_for_distances_and_no_heads(impl):
    x = torch.randn(2, 0, 3, 4)
    out, lse = sc.attention_with_lse(x, x, x, bias=positions.ALiBi(1), impl=impl)
    assert out.shape == (2, 0, 3, 4)
    assert lse.shape == (2, 0, 3)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_calls_share_what_is_hidden_where_the_rule_tells_them_not_apart(batch, heads):
    allowed = torch.ones(batch, heads, 4, 4, dtype=torch.bool).tril()
    query = torch.randn(max(batch, 2), max(heads, 2), 4, 4)
    given = sc.AttentionMatrix(query, query, masks.Dense(allowed)).inputs

    def key(item, head):
        columns = (ColumnRange(range(4), "some"),)
        tile = Tile(slice(item, item + 1), slice(head, head + 1), range(4), columns, given.rule)
        return hidden_key(given, tile)

    assert (key(0, 0) == key(1, 0)) == (batch == 1)
    assert (key(0, 0) == key(0, 1)) == (heads == 1)


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference"])
@pytest.mark.parametrize("entries", [1 << 20, 3600, 40])
def test_a_rule_that_answers_for_each_item_and_head_though_they_are_alike(entries, impl, monkeypatch):
    known = masks.Window.allows

    def for_each(self, b, h, q, kv):
        return known(self, b, h, q, kv) & (b >= 0) & (h >= 0)

    tensors = [torch.cat([x.detach(), x.detach()[:1]]) for x in inputs()]
    want = sc.attention(*tensors, masks.Window(4, 1).to_dense(21), impl="reference")
    monkeypatch.setattr(masks.Window, "allows", for_each)
    monkeypatch.setattr("saccade.engine.kernels.tiled_cost._ENTRIES", entries)
    for items in (1, 2, 3):
        got = sc.attention(*(x[:items] for x in tensors), masks.Window(4, 1), impl=impl)
        torch.testing.assert_close(got, want[:items])
