"""Dense weights that multiply values are reported, unless they come of an attention call."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from saccade.fusion import FuseAttention, ObserveAttention

N, D = 6, 4


@pytest.fixture
def qkv():
    return [torch.randn(2, 3, N, D) for _ in range(3)]


def modes(on_attention, on_weights):
    yield FuseAttention(on_attention=on_attention, on_weights=on_weights)
    yield ObserveAttention(on_attention, on_weights=on_weights)


def reported(function):
    """The attention calls and the dense weights of a function, which are the same for both modes."""
    results = []
    for index in range(2):
        calls, dense = [], []
        with list(modes(calls.append, dense.append))[index]:
            function()
        results.append((len(calls), dense))
    (fused, of_fused), (observed, of_observed) = results
    assert fused == observed
    assert len(of_fused) == len(of_observed)
    for x, y in zip(of_fused, of_observed, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)
    return observed, of_observed


def clamped(q, k):
    return (q @ k.mT).clamp(-1, 1).softmax(-1)


PATHS = {
    "as it is": lambda w: w,
    "dropout": lambda w: F.dropout(w, 0.5, training=False),
    "casts": lambda w: w.double().float(),
    "views": lambda w: w.flatten(0, 1)[None].view(2, 3, N, N).contiguous(),
    "transposed twice": lambda w: w.mT.clone().mT,
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_weights_that_are_not_fused(qkv, path):
    q, k, v = qkv
    calls, dense = reported(lambda: path(clamped(q, k)) @ v)
    assert calls == 0
    assert len(dense) == 1
    torch.testing.assert_close(dense[0], clamped(q, k))


MIX = torch.rand(3, 3)
MIXED = {
    "einsum": lambda w: torch.einsum("hg,bhij->bgij", MIX, w),
    "weights first": lambda w: torch.einsum("b h i j, h g -> b g i j", w, MIX),
    "matmul": lambda w: (w.permute(0, 2, 3, 1) @ MIX).permute(0, 3, 1, 2),
    "layer": lambda w: F.linear(w.permute(0, 2, 3, 1), MIX.T).permute(0, 3, 1, 2),
    "convolution": lambda w: F.conv2d(w, MIX.T[:, :, None, None]),
    "fewer heads": lambda w: torch.einsum("bhij,hg->bgij", w, MIX[:, :2]),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_heads_that_are_mixed_after_the_softmax(qkv, mix):
    q, k, v = qkv
    expected = F.layer_norm(mix(clamped(q, k)), (N,))
    v = v[:, : expected.shape[1]]
    calls, dense = reported(lambda: F.layer_norm(mix(clamped(q, k)), (N,)) @ v)
    assert calls == 0
    torch.testing.assert_close(dense, [expected])


def test_heads_of_one_query_are_mixed(qkv):
    q, k, v = qkv
    q = q[:, :, :1]
    mixed = lambda: torch.einsum("bhij,hg->bgij", clamped(q, k), MIX)  # noqa: E731
    _, dense = reported(lambda: mixed() @ v)
    torch.testing.assert_close(dense, [mixed()])


def slots(q, k):
    weights = clamped(q, k).mT.softmax(-2) + 1e-8
    return weights / weights.sum(-1, keepdim=True)


def test_softmax_over_the_queries_that_is_normalised_over_the_keys(qkv):
    q, k, v = qkv
    calls, dense = reported(lambda: slots(q, k) @ v)
    assert calls == 0
    torch.testing.assert_close(dense, [slots(q, k)])


def test_a_softmax_over_the_queries_alone_is_no_attention(qkv):
    q, k, v = qkv
    assert reported(lambda: clamped(q, k).softmax(-2) @ v) == (0, [])


def test_queries_are_the_axis_that_the_values_lack(qkv):
    q, k, v = qkv

    def attend():
        weights = clamped(q, k).transpose(1, 2).clone().clamp(-1, 2).softmax(-1)  # [batch, queries, heads, keys]
        return torch.einsum("bihj,bhjd->bihd", weights, v)

    _, dense = reported(attend)
    torch.testing.assert_close(dense, [clamped(q, k).softmax(-1)])


def test_keys_on_two_axes(qkv):
    q, k, v = qkv
    of_places = v.unflatten(2, (2, N // 2))
    product = lambda: torch.einsum("bhixy,bhxyd->bhid", clamped(q, k).unflatten(-1, (2, N // 2)), of_places)  # noqa: E731
    calls, dense = reported(product)
    assert calls == 0
    torch.testing.assert_close(dense, [clamped(q, k)])


def test_weights_that_multiply_what_was_made_from_them(qkv):
    q, k, _ = qkv

    def inverted():
        weights = clamped(q, k)
        return weights @ (weights.mT / 2)

    _, dense = reported(inverted)
    torch.testing.assert_close(dense, [clamped(q, k)])


def test_dropout(qkv):
    q, k, v = qkv
    dense = []
    with ObserveAttention(lambda call: None, on_weights=dense.append):
        F.dropout(clamped(q, k), 0.5) @ v
    kept = dense[0] != 0
    torch.testing.assert_close(dense[0], torch.where(kept, 2 * clamped(q, k), 0.0))


LAYOUTS = {
    "joined heads": (lambda w, v: torch.bmm(w.flatten(0, 1), v.flatten(0, 1)), (2, 3, N, N)),
    "heads last": (lambda w, v: torch.einsum("bijh,bhjd->bihd", w.permute(0, 2, 3, 1), v), (2, 3, N, N)),
    "matrix": (lambda w, v: w[0, 0] @ v[0, 0], None),
    "values first": (lambda w, v: v.mT @ w.mT, (2, 3, N, N)),
}


@pytest.mark.parametrize(("product", "shape"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(qkv, product, shape):
    q, k, v = qkv
    _, dense = reported(lambda: product(clamped(q, k), v))
    assert [tuple(x.shape) for x in dense] == ([] if shape is None else [shape])


def test_a_softmax_of_a_matrix():
    x = torch.randn(N, D)
    _, dense = reported(lambda: x.softmax(-1) @ torch.ones(D, 2))
    assert [x.shape for x in dense] == [(1, 1, N, D)]


OTHERS = {
    "no product": lambda q, k, v: clamped(q, k).sum(),
    "another axis": lambda q, k, v: clamped(q, k).mT @ v,
    "elementwise": lambda q, k, v: clamped(q, k)[..., :D] * v,
    "a gate": lambda q, k, v: (clamped(q, k) * (q @ k.mT)) @ v,
    "a layer": lambda q, k, v: nn.Linear(N, 2)(clamped(q, k)),
    "an average": lambda q, k, v: clamped(q, k).mean(1).sum(),
    "an average over the keys": lambda q, k, v: clamped(q, k).mean(-1) @ v[0, 0],
    "the mean": lambda q, k, v: clamped(q, k).mean() * v,
    "a map of heads": lambda q, k, v: F.linear(clamped(q, k).movedim(1, -1), torch.ones(2, 3)).sum(),
}


CHANGES = {
    "in place": lambda w: w.mul_(2),
    "masked": lambda w: w.masked_fill(torch.ones(N, N).triu(1) > 0, 0.0),
    "masked by a product": lambda w: w * (torch.ones(N, N).tril() > 0),
    "normalised": lambda w: w / (w + 1).sum(-1, keepdim=True),
    "mixed": lambda w: 0.5 * w + 0.5 * w.square(),
    "F.normalize": lambda w: F.normalize(w, p=1, dim=-1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_are_changed_one_by_one_are_reported_as_they_multiply(qkv, change):
    q, k, v = qkv
    calls, dense = reported(lambda: change(clamped(q, k)) @ v)
    assert calls == 0
    torch.testing.assert_close(dense, [change(clamped(q, k))])


UNKNOWN = {
    "a part": lambda w, v: w[:, :, :2] @ v,
    "joined": lambda w, v: torch.cat([w[:, :1], w[:, 1:]], 1) @ v,
    "another axis": lambda w, v: w.mT @ v,
    "two softmaxes": lambda w, v: w.softmax(-2) @ v,
    "mixed queries": lambda w, v: torch.einsum("ki,bhij->bhkj", torch.ones(N, N), w) @ v,
    "averaged over heads": lambda w, v: w.mean(1, keepdim=True) @ v,
    "averaged over batch and heads": lambda w, v: w.mean((0, 1)) @ v[0, 0],
    "values as the weight of a layer": lambda w, v: F.linear(w[0, 0] * 1.0, v[0, 0].T),
}


@pytest.mark.parametrize("use", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("is_fused", [True, False])
def test_products_of_an_unknown_layout_are_noted(qkv, use, is_fused):
    q, k, v = qkv
    dense, noted = [], []
    mode = FuseAttention(on_weights=dense.append, on_unknown=lambda: noted.append(1))
    if not is_fused:
        mode = ObserveAttention(lambda call: None, on_weights=dense.append)
        mode.report_unknown = mode._tap._on_unknown = lambda: noted.append(1)
    with mode:
        use(clamped(q, k), v)
    assert not dense
    assert noted


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_nothing_to_report(qkv, other):
    assert reported(lambda: other(*qkv)) == (0, [])


def test_attention_is_not_reported_as_weights(qkv):
    q, k, v = qkv
    assert reported(lambda: (q @ k.mT).softmax(-1) @ v) == (1, [])


def test_attention_that_differs_from_exact_attention(qkv):
    q, k, v = qkv
    hidden = torch.ones(N, N).triu() > 0  # no key for the first query
    calls, dense = reported(lambda: (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v)
    assert calls == 0
    expected = (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1)
    torch.testing.assert_close(dense[0], expected, equal_nan=True)


def test_nothing_is_kept(qkv):
    mode = ObserveAttention(lambda call: None, on_weights=lambda weights: None)
    q, k, v = qkv
    with mode:
        weights = (q @ k.mT / math.sqrt(D)).softmax(-1)
        assert len(mode._states) > 0
        del weights
        clamped(q, k) @ v
        assert len(mode._states) == len(mode._tap._states) == 0


def test_operands_that_are_products():
    x, w = torch.randn(2, N, D), torch.randn(2, D, D)
    assert reported(lambda: ((x @ w) @ (x @ w).mT).softmax(-1) @ (x @ w)) == (1, [])


def test_operands_in_a_list(qkv):
    q, k, v = qkv

    def attend():
        weights = torch.einsum("bhid,bhjd->bhij", [q, k]).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", [weights, v])

    assert reported(attend) == (1, [])
