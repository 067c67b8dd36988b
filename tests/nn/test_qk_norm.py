"""Norms of queries and keys: the definition, before and after the rotation, with caches, nested, split over ranks."""

import pytest
import torch
from torch import nn

from saccade import masks
from saccade.caches import CrossCache, KVCache, SinkWindowCache
from saccade.distributed import tp_plan
from saccade.nn import DecoderLayer, FeedForward, MultiHeadAttention, QKNorm, to_torch
from saccade.positions import Rotary
from saccade.support.errors import UnsupportedError

NORMS = [
    QKNorm(),
    QKNorm("all_heads", 1e-3),
    QKNorm(learned=False),
    QKNorm(after_rotary=True),
    QKNorm(after_rotary=True, learned=False),
]
ROTARY = Rotary(6)


def _mha(norm, **options):
    torch.manual_seed(0)
    mha = MultiHeadAttention(20, 4, num_kv_heads=2, head_dim=6, qk_norm=norm, rotary=ROTARY, **options).double()
    for name, parameter in mha.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.4)
    return mha


def _normed(x, norm, weight):
    """The definition, on heads ``[batch, heads, len, width]``."""
    axes = (1, 3) if norm.across == "all_heads" else (3,)
    out = x * (x.pow(2).mean(axes, keepdim=True) + norm.eps).rsqrt()
    if weight is None:
        return out
    return out * (weight if norm.across == "head" else weight.view(1, x.shape[1], 1, -1))


def _expected(mha, norm, x):
    q, k, v = (
        projection(x).unflatten(2, (-1, 6)).transpose(1, 2)
        for projection in (mha.query_projection, mha.key_projection, mha.value_projection)
    )
    weights = [None if one.weight is None else one.weight for one in (mha.query_norm, mha.key_norm)]
    turned = []
    for heads, weight in zip((q, k), weights, strict=True):
        if norm.after_rotary:
            turned.append(_normed(ROTARY(heads, range(x.shape[1])), norm, weight))
        else:
            turned.append(ROTARY(_normed(heads, norm, weight), range(x.shape[1])))
    q, k, v = turned[0], turned[1].repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = (q @ k.mT / 6**0.5).masked_fill(~torch.ones(x.shape[1], x.shape[1]).tril().bool(), -torch.inf)
    return mha.output_projection((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), scores.softmax(-1)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_it_is_the_definition(norm):
    mha, x = _mha(norm, mask=masks.Causal()), torch.randn(2, 7, 20, dtype=torch.float64)
    out, weights = _expected(mha, norm, x)
    torch.testing.assert_close(mha(x), out)
    torch.testing.assert_close(mha.matrix(x).to_dense(), weights)
    parameters = list(mha.parameters())
    for own, expected in zip(
        torch.autograd.grad(mha(x).square().sum(), parameters),
        torch.autograd.grad(out.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_steps_with_a_cache_are_the_full_run(norm):
    mha, x = _mha(norm, mask=masks.Causal()), torch.randn(2, 7, 20, dtype=torch.float64)
    cache = KVCache()
    parts = [mha(part, cache=cache) for part in x.split([3, 1, 2, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), mha(x))


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_items_of_a_nested_tensor_are_each_alone(norm):
    mha = _mha(norm, mask=masks.Causal())
    items = [torch.randn(length, 20, dtype=torch.float64) for length in (3, 5)]
    out = mha(torch.nested.nested_tensor(items, layout=torch.jagged))
    for own, item in zip(out.unbind(), items, strict=True):
        torch.testing.assert_close(own, mha(item[None])[0])


def test_a_context_is_normed_once():
    mha = MultiHeadAttention(20, 4, head_dim=6, context_dim=8, qk_norm=QKNorm()).double()
    x, context, cache = torch.randn(2, 3, 20).double(), torch.randn(2, 5, 8).double(), CrossCache()
    expected = mha(x, context)
    torch.testing.assert_close(mha(x, context, cache=cache), expected)
    torch.testing.assert_close(mha(x, cache=cache), expected)


def test_a_cache_that_turns_keys_again_refuses_norms_behind_the_rotation():
    cache = SinkWindowCache(1, 4, rotary=ROTARY)
    x = torch.randn(1, 3, 20, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="it rotates stored keys again"):
        _mha(QKNorm(after_rotary=True), mask=masks.Causal())(x, cache=cache)
    _mha(QKNorm(), mask=masks.Causal())(x, cache=cache)


def test_what_torch_and_ranks_lack_is_refused():
    mha = MultiHeadAttention(8, 2, qk_norm=QKNorm())
    with pytest.raises(UnsupportedError, match="it has a norm of queries and keys"):
        to_torch(mha)
    with pytest.raises(UnsupportedError, match="its heads are 6 wide"):
        to_torch(MultiHeadAttention(8, 2, head_dim=6))
    with pytest.raises(UnsupportedError, match="its norm of queries and keys combines heads"):
        tp_plan(mha, 2)
    assert "query_projection" in tp_plan(MultiHeadAttention(8, 2, qk_norm=QKNorm(learned=False)), 2)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"across": "heads"}, "across must be one of 'head', 'all_heads'"),
        ({"eps": 0.0}, "eps must be a finite number above 0"),
        ({"after_rotary": True, "across": "all_heads"}, "across must be one of 'head'"),
        ({"learned": 1}, "learned must be True or False"),
    ],
)
def test_wrong_options_are_refused(options, rule):
    with pytest.raises((ValueError, TypeError), match=rule):
        QKNorm(**options)


def _layer(**options):
    torch.manual_seed(1)
    return DecoderLayer(MultiHeadAttention(8, 2), FeedForward(8, 12), norm="rms", **options)


def test_norms_around_the_parts():
    layer, x = _layer(part_norm=True), torch.randn(2, 5, 8)
    inner = x + layer.attention_part_norm(layer.attention(layer.attention_norm(x)))
    expected = inner + layer.feed_forward_part_norm(layer.feed_forward(layer.feed_forward_norm(inner)))
    torch.testing.assert_close(layer(x), expected)


def test_norms_behind_the_parts():
    layer, x = _layer(part_norm=True, norm_first=False), torch.randn(2, 5, 8)
    assert layer.attention_part_norm is None
    inner = x + layer.attention_norm(layer.attention(x))
    torch.testing.assert_close(layer(x), inner + layer.feed_forward_norm(layer.feed_forward(inner)))
    torch.testing.assert_close(layer.matrix(x).to_dense(), layer.attention.matrix(x).to_dense())


def test_parts_side_by_side():
    layer, x = _layer(parallel=True), torch.randn(2, 5, 8)
    tokens = layer.attention_norm(x)
    torch.testing.assert_close(layer(x), x + layer.attention(tokens) + layer.feed_forward(tokens))
    assert layer.feed_forward_norm is None


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"parallel": True, "norm_first": False}, "parallel must be False unless"),
        ({"parallel": True, "part_norm": True}, "parallel must be False unless"),
        (
            {"part_norm": True, "cross_attention": MultiHeadAttention(8, 2)},
            "part_norm must be False in a layer with cross",
        ),
        (
            {"parallel": True, "cross_attention": MultiHeadAttention(8, 2)},
            "parallel must be False in a layer with cross",
        ),
    ],
)
def test_layers_that_make_no_sense_are_refused(options, rule):
    with pytest.raises(ValueError, match=rule):
        _layer(**options)
