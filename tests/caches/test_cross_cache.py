"""Tests of CrossCache: a context is projected and appended once and read by every call, with one memory per layer."""

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import (
    CrossCache,
    padded_positions,
)
from saccade.mechanisms import Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import Rotary

SOFTMAX, CAUSAL = Softmax(), masks.Causal()


def _qkv(q_len: int = 3, batch: int = 2, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    heads = (4, kv_heads, kv_heads)
    return [torch.randn(batch, own, q_len, 8, dtype=dtype) for own in heads]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_context_is_projected_once(ragged: bool) -> None:
    mha = MultiHeadAttention(16, 4, num_kv_heads=2, context_dim=10, mechanism=Softmax(sink_logit=4)).eval()
    x, context = torch.randn(2, 5, 16), torch.randn(2, 7, 10)
    kv_positions = padded_positions([7, 4]) if ragged else None
    where = {"positions": range(5), "kv_positions": kv_positions} if ragged else {}
    full = mha(x, context, **where)
    calls: list[object] = []
    handle = mha.key_projection.register_forward_hook(lambda *of: calls.append(of))
    cache = CrossCache()
    first = mha(x[:, :2], context, cache=cache, kv_positions=kv_positions, positions=range(2) if ragged else None)
    rest = [
        mha(x[:, 2:4], context, cache=cache, positions=range(2, 4) if ragged else None),
        mha(x[:, 4:], cache=cache, positions=range(4, 5) if ragged else None),
    ]
    handle.remove()
    assert len(calls) == 1
    torch.testing.assert_close(torch.cat([first, *rest], 1), full)
    fork = cache.fork()
    fork.reorder([1, 1])
    fork.crop(0)
    out = mha(x[[1, 1], 2:], cache=fork, positions=range(2, 5) if ragged else None)
    torch.testing.assert_close(out, full[[1, 1], 2:])
    torch.testing.assert_close(mha(x, cache=cache, positions=range(5) if ragged else None), full)
    assert cache.nbytes == 2 * 2 * 2 * 7 * 4 * 4 + (2 * 7 * 8 if ragged else 0)


def test_weights_of_a_context_are_dropped() -> None:
    q, k, v = _qkv(9)
    cache = CrossCache()
    cache.fill(k, torch.ones_like(v))
    torch.testing.assert_close(cache.attend(SOFTMAX, q), torch.ones_like(q))
    assert (cache.attend(SOFTMAX, q, dropout_p=0.5) - 1).abs().amax() > 0.1


def test_a_context_is_appended_once_and_read_by_every_call() -> None:
    cache, (q, k, v) = CrossCache(), _qkv()
    held = k.nbytes + v[..., :5].nbytes
    assert (cache.length, cache.key, cache.kv_positions, cache.positions(3)) == (0, None, None, None)
    cache.fill(k, v[..., :5])
    assert (cache.length, cache.nbytes, cache.kv_positions) == (3, held, None)
    for appended in (held, 0, 0):
        cache.attend(SOFTMAX, q)
        assert cache.traffic == (held, appended)
    placed = CrossCache()
    placed.attend(SOFTMAX, q, k, v)
    assert placed.traffic == (k.nbytes + v.nbytes,) * 2
    with pytest.raises(ValueError, match="key and value must be passed in the first call"):
        CrossCache().attend(SOFTMAX, q, k)


def test_gradients_reach_a_context_that_wants_them() -> None:
    (q, k, v), cache = _qkv(), CrossCache()
    leaves = [k.requires_grad_(), v.requires_grad_()]
    cache.attend(SOFTMAX, q, *leaves)
    own = torch.autograd.grad(cache.attend(SOFTMAX, q).sin().sum(), leaves)
    for mine, expected in zip(own, torch.autograd.grad((SOFTMAX(q, k) @ v).sin().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_context_keeps_its_own_memory() -> None:
    cache, (q, k, v) = CrossCache(), _qkv()
    before = cache.attend(SOFTMAX, q, k, v)
    k.fill_(0)
    torch.testing.assert_close(cache.attend(SOFTMAX, q), before)
    with pytest.raises(ValueError, match=r"CrossCache\.attend: cache must be empty; got 3 keys"):
        cache.attend(SOFTMAX, q, k, v)
    with pytest.raises(
        ValueError, match=r"value must have shape \[batch, kv_heads, len, value_dim\] = \[2, 2, 3, value_dim\]"
    ):
        CrossCache().fill(k, v[:, :, :1])


def test_positions_of_a_context_that_all_items_share_stay_when_items_are_reordered() -> None:
    cache, (q, k, v) = CrossCache(), _qkv(3, batch=3)
    cache.fill(k, v, kv_positions=torch.tensor([4, 5, -1]))
    cache.reorder([2, 0])
    expected = SOFTMAX(q[[2, 0]], k[[2, 0], :, :2], mask=CAUSAL, q_positions=range(4, 7), kv_positions=range(4, 6))
    out = cache.attend(SOFTMAX, q[[2, 0]], mask=CAUSAL, positions=range(4, 7))
    torch.testing.assert_close(out, expected @ v[[2, 0], :, :2])


def test_rotated_context_needs_positions() -> None:
    mha = MultiHeadAttention(16, 4, rotary=Rotary(4)).eval()
    x, context = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match="positions must be given with rotary and a CrossCache"):
        mha(x, context, cache=CrossCache())
    cache = CrossCache()
    full = mha(x, context, positions=range(2, 5), kv_positions=range(5))
    out = [mha(x[:, i : i + 1], context, cache=cache, positions=range(2 + i, 3 + i)) for i in range(3)]
    torch.testing.assert_close(torch.cat(out, 1), full)
