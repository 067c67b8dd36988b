"""Tests of the terms that the fused kernel adds to scores: the calls that it makes, and how much a plan keeps."""

import math

import pytest
import torch
from torch.nn import functional as F

import saccade as sc
from saccade import masks, positions, scores
from saccade.engine.kernels.additive_masks import Added
from saccade.testing import oracle


def inputs(*, batch=2, heads=4, kv_heads=2, length=21, dtype=torch.float64):
    sizes = [(batch, number, length, 8) for number in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, dtype=torch.float64).to(dtype) for size in sizes]


def transposed(x):
    return x.mT.contiguous().mT


def spread(x):
    return x.repeat_interleave(2, 2)[..., ::2]


def shared(x):
    return x[..., :1].expand_as(x)


@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), masks.Window(4, 2)], ids=str)
@pytest.mark.parametrize("layout", [transposed, spread, shared], ids=["transposed", "spread", "shared"])
def test_a_bias_in_another_layout(layout, mask):
    tensors, bias = [x.requires_grad_() for x in inputs()], layout(torch.randn(4, 21, 21, dtype=torch.float64))
    ours = sc.attention_with_lse(*tensors, mask, bias=bias, impl="fused")
    theirs = oracle.attention(*tensors, mask.to_dense(21, batch=2, heads=4), bias=bias)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), tensors) for out, _ in (ours, theirs)))


@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal()], ids=str)
def test_a_bias_narrower_than_what_a_score_makes_of_the_query(mask):
    query, key, value = inputs(dtype=torch.bfloat16)
    bias = torch.randn(4, 21, 21).bfloat16()
    out = sc.attention(query, key, value, mask, score=scores.Cosine(), scale=2.0, bias=bias, impl="fused")
    unit = (F.normalize(x.double(), dim=3) for x in (query, key))
    want, _ = oracle.attention(*unit, value.double(), mask.to_dense(21, batch=2, heads=4), scale=2.0, bias=bias)
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference"])
@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal()], ids=str)
def test_a_row_whose_bias_is_infinite_is_not_one_that_sees_nothing(mask, impl):
    tensors, bias = inputs(), torch.zeros(21, 21, dtype=torch.float64)
    want, want_lse = oracle.attention(*tensors, mask.to_dense(21, batch=2, heads=4))
    bias[20] = math.inf
    out, lse = sc.attention_with_lse(*tensors, mask, bias=bias, impl=impl)
    assert out[:, :, 20].isnan().all()
    assert not (lse[:, :, 20] < math.inf).any()
    torch.testing.assert_close(out[:, :, :20], want[:, :, :20])
    torch.testing.assert_close(lse[:, :, :20], want_lse[:, :, :20])


@pytest.mark.parametrize("by", ["the mask", "the bias"])
def test_a_row_that_sees_nothing_where_its_scores_overflow(by):
    query, key, value = inputs(dtype=torch.float32)
    query[:, :, 20], key[:] = 1e25, 1e25
    bias = torch.zeros(21, 21)
    bias[20] = -math.inf
    given = {"mask": ~masks.Causal()} if by == "the mask" else {"bias": bias}
    out, lse = sc.attention_with_lse(query, key, value, **given, impl="fused")
    assert by == "the bias" or not out[:, :, 20].any()  # of a bias, inf - inf is what was asked for
    assert (lse[:, :, 20] == -math.inf).all()
    assert lse[:, :, :20].isfinite().all()


@pytest.mark.parametrize("missing", [0, 1])
def test_a_plan_caches_hidden_pairs_up_to_its_limit(missing, monkeypatch):
    def entries():
        sc.attention(*tensors, mask, impl="fused")
        return sum(x.terms.numel() for x in plan.memo.values() if isinstance(x, Added))

    tensors, mask = inputs(length=1500), masks.Window(40, 30)
    plan = mask.plan(1500, batch=2, heads=4)
    whole = entries()
    plan.memo.clear()
    monkeypatch.setattr("saccade.engine.kernels.additive_masks._MEMO_ENTRIES", whole - missing)
    held = entries()
    plan.memo.clear()
    assert 0 < held <= whole - missing
    assert (held == whole) == (missing == 0)


@pytest.mark.parametrize("entries", [5600, 1800])  # two items at once and then one; four heads and then two
def test_parts_of_unlike_size_of_a_rule_that_answers_for_each_item_and_head(entries, monkeypatch):
    known, tensors, bias = masks.Window.allows, inputs(batch=3, heads=6, kv_heads=3), positions.ALiBi(6)

    def for_each(self, b, h, q, kv):
        return known(self, b, h, q, kv) & (b >= 0) & (h >= 0)

    want = sc.attention(*tensors, masks.Window(4, 1).to_dense(21), bias=bias, impl="reference")
    monkeypatch.setattr(masks.Window, "allows", for_each)
    monkeypatch.setattr("saccade.engine.kernels.fused_calls._READ_ENTRIES", entries)
    torch.testing.assert_close(sc.attention(*tensors, masks.Window(4, 1), bias=bias, impl="fused"), want)


@pytest.mark.parametrize("mask", [masks.Window(4, 2), ~masks.Causal(), masks.Strided(3) | masks.Window(2, 2)], ids=str)
def test_another_default_device_changes_nothing(mask):
    tensors, plan = [x.requires_grad_() for x in inputs()], mask.plan(21, batch=2, heads=4)

    def results():
        plan.memo.clear()
        out, lse = sc.attention_with_lse(*tensors, mask, impl="fused")
        plan.memo.clear()
        return out, lse, *torch.autograd.grad(out.sin().sum() + lse[lse.isfinite()].sum(), tensors)

    want = results()
    with torch.device("meta"):
        found = results()
    assert all(torch.equal(own, other) for own, other in zip(found, want, strict=True))


def test_empty_inputs_compute_no_pair():
    query, key, _ = inputs()
    assert sc.AttentionMatrix(query, key, ~masks.Full(), impl="fused").explain().pairs == 0


@pytest.mark.parametrize("wide", [1, 8])
def test_keys_that_every_row_has_in_a_call_of_their_own(wide, monkeypatch):
    monkeypatch.setattr("saccade.engine.kernels.fused_calls._WIDE", wide)
    tensors = [x.requires_grad_() for x in inputs()]
    mask = masks.Window(4, 2) | masks.Global(range(10))
    ours = sc.attention_with_lse(*tensors, mask, impl="fused")
    theirs = oracle.attention(*tensors, mask.to_dense(21, batch=2, heads=4))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), tensors) for out, _ in (ours, theirs)))
