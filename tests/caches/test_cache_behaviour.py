"""Caches in use: memory, what they share, gradients, and what they refuse before anything is written."""

import re
from collections.abc import Callable

import pytest
import torch
from tests.caches import cache_kinds
from torch import Tensor

from saccade import masks
from saccade.caches import (
    BlockSelectCache,
    Cache,
    CrossCache,
    HeavyHitterCache,
    Int8Cache,
    KVCache,
    LayerCache,
    SinkWindowCache,
    SnapKVCache,
    padded_positions,
)
from saccade.mechanisms import Softmax
from saccade.nn import AttentionBlock, MultiHeadAttention
from saccade.positions import Rotary

SOFTMAX, CAUSAL = Softmax(), masks.Causal()

KINDS: dict[str, Callable[[], LayerCache]] = cache_kinds.KINDS | {
    "turned": lambda: SinkWindowCache(2, 5, rotary=Rotary(8))
}


def _qkv(q_len: int = 3, batch: int = 2, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    heads = (4, kv_heads, kv_heads)
    return [torch.randn(batch, own, q_len, 8, dtype=dtype) for own in heads]


def _filled(max_len: int | None = None, q_len: int = 3) -> KVCache:
    cache = KVCache(max_len)
    cache.attend(SOFTMAX, *_qkv(q_len), mask=CAUSAL)
    return cache


def test_bytes_are_those_of_the_tensors() -> None:
    token = 2 * 2 * 8 * 4 * 2  # batch, kv heads, width, bytes, key and value
    cache = _filled(max_len=100)
    assert cache.nbytes == 100 * token
    grown = KVCache()
    assert grown.nbytes == 0
    for n in (20, 1, 1):
        grown.attend(SOFTMAX, *_qkv(n), mask=CAUSAL)
        assert grown.length * token <= grown.nbytes <= 2 * grown.length * token
    half = KVCache(10)
    half.attend(SOFTMAX, *_qkv(dtype=torch.bfloat16), mask=CAUSAL)
    assert half.nbytes == 10 * token // 2
    ragged = KVCache(10)
    ragged.attend(SOFTMAX, *_qkv(), mask=CAUSAL, positions=padded_positions([3, 1]))
    assert ragged.nbytes == 10 * token + 2 * 3 * 8  # and where the tokens stand


def test_room_is_doubled_and_what_is_filled_counts_as_appended() -> None:
    token, cache, sizes = 2 * 2 * 8 * 4 * 2, KVCache(), []
    for _ in range(34):
        cache.attend(SOFTMAX, *_qkv(1), mask=CAUSAL)
        sizes.append(cache.nbytes // token)
    assert sizes == [16] * 16 + [32] * 16 + [64] * 2
    wide = KVCache()
    wide.attend(SOFTMAX, *_qkv(20), mask=CAUSAL)
    assert (wide.nbytes, wide.traffic) == (20 * token, (20 * token, 20 * token))
    filled, (_, k, v) = KVCache(), _qkv(5)
    with pytest.raises(ValueError, match=r"KVCache\.fill: positions must hold 5 positions; got 4"):
        filled.fill(k, v, positions=range(4))
    filled.fill(k, v[..., :2], positions=range(3, 8))
    assert filled.traffic == (0, 5 * token * 10 // 16)
    assert (filled.kv_positions, filled.positions(1)) == (range(3, 8), range(8, 9))
    with pytest.raises(ValueError, match="value_dim of value must be 2, as in the cache; got 8"):
        filled.attend(SOFTMAX, *_qkv(1), mask=CAUSAL)
    with pytest.raises(ValueError, match=r"KVCache\.fill: cache must be empty; got 5 columns"):
        filled.fill(k, v)


@pytest.mark.parametrize("make", [KVCache, lambda: SinkWindowCache(1, 8)], ids=["all", "window"])
def test_one_token_may_stand_in_a_range_of_any_step(make: Callable[[], LayerCache]) -> None:
    for run in (range(9, 11, 2), range(9, 8, -1)):
        cache = make()
        cache.attend(SOFTMAX, *_qkv(1), mask=CAUSAL, positions=run)
        assert cache.positions(2) == range(10, 12)


@pytest.mark.parametrize(
    "run", [range(4, 0, -1), range(4, 2, -1), range(4, 8, 2), range(4, 8, 3), range(2, 5), range(2, 3)], ids=str
)
def test_a_cache_without_order_takes_tokens_one_behind_the_other(run: range) -> None:
    cache = SinkWindowCache(1, 8)
    cache.attend(SOFTMAX, *_qkv(3), mask=CAUSAL)
    with pytest.raises(ValueError, match="positions must increase and come after those in the cache"):
        cache.attend(SOFTMAX, *_qkv(len(run)), mask=CAUSAL, positions=run)
    assert cache.positions(1) == range(3, 4)
    one = SinkWindowCache(1, 8)
    one.attend(SOFTMAX, *_qkv(1), mask=CAUSAL)
    with pytest.raises(ValueError, match="positions must increase and come after those in the cache"):
        one.attend(SOFTMAX, *_qkv(1), mask=CAUSAL, positions=range(1))


def test_nothing_is_shared_with_the_caller() -> None:
    q, k, v = _qkv()
    positions = padded_positions([3, 2])
    cache = KVCache()
    cache.attend(SOFTMAX, q, k, v, mask=CAUSAL, positions=positions)
    held = [x.clone() for x in (cache.key, cache.value, cache.kv_positions) if isinstance(x, Tensor)]
    for x in (k, v, positions):
        x.fill_(5)
    for own, before in zip((cache.key, cache.value, cache.kv_positions), held, strict=True):
        assert isinstance(own, Tensor)
        assert torch.equal(own, before)
    assert cache.positions(1).tolist() == [[3], [2]]


def test_gradients_reach_the_tokens_of_the_call_and_stop_at_the_past() -> None:
    cache = KVCache()
    past = [x.double().requires_grad_() for x in _qkv(3)]
    cache.attend(SOFTMAX, *past, mask=CAUSAL).sum().backward()
    assert all(x.grad is not None for x in past)
    kept_k, kept_v = (x.detach().clone() for x in past[1:])
    for x in past:
        x.grad = None
    new = [x.double().requires_grad_() for x in _qkv(2)]
    out = cache.attend(SOFTMAX, *new, mask=CAUSAL)
    cache.attend(SOFTMAX, *(x.double() for x in _qkv(4)), mask=CAUSAL)  # what is written now must not spoil the graph
    out.pow(2).sum().backward()
    q, k, v = (x.detach().clone().requires_grad_() for x in new)
    keys, values = torch.cat([kept_k, k], 2), torch.cat([kept_v, v], 2)
    (SOFTMAX(q, keys, mask=CAUSAL) @ values).pow(2).sum().backward()
    for own, other in zip(new, (q, k, v), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert all(x.grad is None for x in past)
    assert cache.key is not None
    assert not cache.key.requires_grad


def test_a_trained_sink_gets_its_gradient_whatever_is_written_later() -> None:
    softmax, cache = Softmax(sink_logit=4), KVCache()
    out = cache.attend(softmax, *_qkv(3), mask=CAUSAL)
    cache.attend(softmax, *_qkv(2), mask=CAUSAL)
    out.sum().backward()
    assert softmax.sink_logit is not None
    assert softmax.sink_logit.grad is not None


def test_a_cache_made_in_inference_mode_serves_outside_of_it() -> None:
    q, k, v = _qkv(5)
    cache = KVCache()
    with torch.inference_mode():
        cache.attend(SOFTMAX, q[:, :, :4], k[:, :, :4], v[:, :, :4], mask=CAUSAL)
    out = cache.attend(SOFTMAX, q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], mask=CAUSAL)
    torch.testing.assert_close(out, (SOFTMAX(q, k, mask=CAUSAL) @ v)[:, :, 4:])


def test_a_call_that_fails_leaves_no_trace() -> None:
    cache = _filled()
    key = cache.key
    with pytest.raises(TypeError, match="mask must be None, a saccade mask"):
        cache.attend(SOFTMAX, *_qkv(1), mask=3)
    assert cache.length == 3
    assert cache.positions(1) == range(3, 4)
    torch.testing.assert_close(cache.key, key)


def test_a_full_cache_says_so_and_keeps_what_it_has() -> None:
    cache = _filled(max_len=4)
    sentence = r"KVCache\.attend: tokens must fit in max_len 4; got 3 stored and 2 new\."
    with pytest.raises(ValueError, match=sentence):
        cache.attend(SOFTMAX, *_qkv(2), mask=CAUSAL)
    cache.attend(SOFTMAX, *_qkv(1), mask=CAUSAL)
    assert cache.length == 4


@pytest.mark.parametrize(
    "name, own, other",
    [("batch", 2, 3), ("kv_heads", 2, 4), ("head_dim", 8, 6), ("value_dim", 8, 5), ("dtype", "float32", "float64")],
)
def test_other_tensors_than_before_are_refused(name: str, own: object, other: object) -> None:
    cache = _filled()
    q, k, v = _qkv(1, **{name: other} if name in ("batch", "kv_heads") else {})
    q, k = (x[..., :6] if name == "head_dim" else x for x in (q, k))
    given = [q, k, v[..., :5] if name == "value_dim" else v]
    given = [x.double() if name == "dtype" else x for x in given]
    what = f"{name} of {'value' if name == 'value_dim' else 'key'}"
    with pytest.raises(ValueError, match=f"{what} must be {own}, .*; got {other}") as error:
        cache.attend(SOFTMAX, *given, mask=CAUSAL)
    assert isinstance(error.value, TypeError) == (name == "dtype")
    assert cache.length == 3


@pytest.mark.parametrize(
    "which, axis", [(which, axis) for which in range(3) for axis in (0, 1, 2) if (which, axis) != (0, 1)]
)
def test_one_tensor_of_another_size_is_refused(which: int, axis: int) -> None:
    given, cache = _qkv(3, batch=3, kv_heads=4), KVCache()
    given[which] = given[which].narrow(axis, 0, 2)
    if (which, axis) == (1, 1):
        given[0] = given[0][:, :2]  # heads that would fit
    with pytest.raises(ValueError, match=r"KVCache\.attend: (key|value) must have shape"):
        cache.attend(SOFTMAX, *given)
    assert (cache.length, cache.nbytes) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_that_is_repeated_goes_on_in_each_copy(kind: str) -> None:
    cache = KINDS[kind]()
    cache.attend(SOFTMAX, *_qkv(12, batch=1), mask=CAUSAL)
    assert cache.traffic.bytes_read > 0
    fork = cache.fork()
    assert fork.traffic == (0, 0)
    fork.reorder(torch.tensor([0, 0, 0], dtype=torch.int32))
    for length in (1, 3, 1):
        new = _qkv(length, batch=1)
        expected = cache.attend(SOFTMAX, *new, mask=CAUSAL).expand(3, -1, -1, -1)
        out = fork.attend(SOFTMAX, *(x.expand(3, -1, -1, -1) for x in new), mask=CAUSAL)
        torch.testing.assert_close(out, expected)


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    q, k, v = _qkv(2)
    cache = KVCache()
    with pytest.raises(ValueError, match=r"key must have shape .* = \[2, kv_heads, 2, key_dim\]; got \[2, 2, 1, 8\]"):
        cache.attend(SOFTMAX, q, k[:, :, :1], v)
    with pytest.raises(ValueError, match=r"value must have shape .* = \[2, 2, 2, value_dim\]; got \[2, 1, 2, 8\]"):
        cache.attend(SOFTMAX, q, k, v[:, :1])
    with pytest.raises(ValueError, match="dtype must be the same for query, key and value"):
        cache.attend(SOFTMAX, q, k, v.double())
    with pytest.raises(ValueError, match=r"key must have shape \[batch, kv_heads, q_len, key_dim\]"):
        cache.attend(SOFTMAX, q, k[0], v)
    with pytest.raises(TypeError, match="value must be a tensor; got int"):
        cache.attend(SOFTMAX, q, k, 3)
    with pytest.raises(ValueError, match="mask must be a rule on positions"):
        cache.attend(SOFTMAX, q, k, v, mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="positions must hold 2 positions; got 3"):
        cache.attend(SOFTMAX, q, k, v, positions=range(3))
    assert (cache.length, cache.nbytes) == (0, 0)


@pytest.mark.parametrize(
    "call, error, sentence",
    [
        (lambda: KVCache(0), ValueError, "KVCache: max_len must be an int of at least 1; got 0"),
        (lambda: KVCache(2.0), TypeError, "KVCache: max_len must be an int of at least 1; got 2.0"),
        (lambda: KVCache(True), TypeError, "max_len must be an int"),
        (
            lambda: _filled().crop(4),
            ValueError,
            r"KVCache\.crop: length must be from 0 to 3, the number of stored columns; got 4",
        ),
        (lambda: _filled().crop(-1), ValueError, "length must be from 0 to 3"),
        (lambda: _filled().crop(1.0), TypeError, "length must be an int; got 1.0"),
        (lambda: _filled().reorder([2]), ValueError, r"KVCache\.reorder: rows must be batch items, from 0 to 1; got 2"),
        (lambda: _filled().reorder([-1]), ValueError, "from 0 to 1; got -1"),
        (lambda: _filled().reorder([0.0]), TypeError, "rows must be an int tensor"),
        (lambda: _filled().reorder(torch.ones(2, dtype=torch.bool)), TypeError, "rows must be an int tensor"),
        (lambda: _filled().reorder("01"), TypeError, "rows must be an int tensor"),
        (lambda: _filled().reorder(torch.tensor([[0, 1]])), TypeError, "rows must be an int tensor"),
        (lambda: _filled().reorder(1), TypeError, "rows must be an int tensor"),
        (lambda: _filled().reorder({0, 1}), TypeError, "rows must be an int tensor"),
        (lambda: KVCache().positions(-1), ValueError, "q_len must be an int of at least 0; got -1"),
        (lambda: padded_positions([3], side="up"), ValueError, "side must be one of 'right', 'left'"),
        (lambda: padded_positions([3], padded_len=2), ValueError, "padded_len must be at least the longest item"),
        (lambda: padded_positions([-1]), ValueError, "lengths must be ints of at least 0"),
        (lambda: Cache([]), ValueError, "Cache: layers must contain at least one cache; got none"),
        (lambda: Cache([KVCache()] * 2), ValueError, "layers must be different objects"),
        (lambda: Cache([3]), TypeError, "layers must be layer caches; got int"),
        (lambda: Cache([_filled()]).crop(4), ValueError, r"Cache\.crop: length must be from 0 to 3"),
        (lambda: CrossCache().attend(SOFTMAX, _qkv()[0]), ValueError, "key and value must be passed in the first call"),
    ],
)
def test_impossible_arguments_are_refused(call, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call()


def test_lengths_become_positions() -> None:
    assert padded_positions([2, 0, 3]).tolist() == [[0, 1, -1], [-1, -1, -1], [0, 1, 2]]
    assert padded_positions([2, 3], side="left", padded_len=4).tolist() == [[-1, -1, 0, 1], [-1, 0, 1, 2]]
    assert padded_positions(torch.tensor([1]), padded_len=2).dtype == torch.int64


def test_equal_lengths_cost_no_table() -> None:
    cache = KVCache()
    cache.attend(SOFTMAX, *_qkv(3), mask=CAUSAL, positions=padded_positions([3, 3]))
    assert cache.kv_positions == range(3)
    cache.attend(SOFTMAX, *_qkv(1), mask=CAUSAL, positions=torch.tensor([3]))
    assert cache.kv_positions == range(4)
    cache.attend(SOFTMAX, *_qkv(1), mask=CAUSAL, positions=range(7, 8))
    assert cache.kv_positions.tolist() == [[0, 1, 2, 3, 7]] * 2


def test_defaults_are_the_documented_ones() -> None:
    blocks, snap = BlockSelectCache(2, 6), SnapKVCache(40)
    assert (blocks.sink_blocks, blocks.local_blocks, blocks.rescore_every, blocks.prompt) == (1, 2, 1, "dense")
    assert (snap.window, snap.pool, snap.recent, Int8Cache().block_size) == (32, 5, 32, 64)
    assert [HeavyHitterCache(budget).recent for budget in (1, 2, 3, 9)] == [1, 1, 1, 4]
    assert (HeavyHitterCache(4, recent=4).recent, SnapKVCache(4, window=4).window) == (4, 4)
    assert BlockSelectCache(2, 6, prompt="sparse", rescore_every=1).prompt == "sparse"


def test_a_mechanism_names_its_cache() -> None:
    cache = SOFTMAX.new_cache()
    assert isinstance(cache, KVCache)
    assert cache.max_len is None
    assert SOFTMAX.new_cache(7).max_len == 7
    assert repr(_filled(4)) == f"KVCache(max_len=4, length=3, nbytes={4 * 256})"


def test_a_model_s_cache_is_all_of_its_layers() -> None:
    inner = Cache([KVCache(), CrossCache()])
    cache = Cache([inner, Cache([KVCache(), CrossCache()])])
    q, k, v = _qkv(3)
    for layer in cache.flat:
        layer.attend(SOFTMAX, q, k, v)
    assert (len(cache), len(cache.flat), cache.length) == (2, 4, 3)
    assert cache[0] is inner
    assert next(iter(cache)) is inner
    assert cache.nbytes == sum(layer.nbytes for layer in cache.flat)
    assert cache.positions(1) == range(3, 4)
    other = cache.fork()
    other.reorder([1, 1, 0])
    other.crop(1)
    assert [layer.length for layer in other.flat] == [1, 3, 1, 3]
    assert all(layer.key.shape[0] == 3 for layer in other.flat)
    assert [layer.length for layer in cache.flat] == [3, 3, 3, 3]
    torch.testing.assert_close(other.flat[1].key, k[[1, 1, 0]])
    assert Cache([CrossCache()]).positions(1) is None
    assert "2 layers, length=3" in repr(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_dropped_in_prompts_and_in_steps(kind: str) -> None:
    cache = KINDS[kind]()
    for length in (12, 1, 3, 1):
        q, k, v = _qkv(length)
        plain = cache.fork().attend(SOFTMAX, q, k, torch.ones_like(v), mask=CAUSAL)
        torch.testing.assert_close(plain, torch.ones_like(plain))
        out = cache.attend(SOFTMAX, q, k, torch.ones_like(v), mask=CAUSAL, dropout_p=0.5)
        assert (out - 1).abs().amax() > 0.1


def test_layers_refuse_what_a_cache_cannot_mean() -> None:
    mha = MultiHeadAttention(16, 4, mask=CAUSAL).eval()
    x = torch.randn(2, 3, 16)
    with pytest.raises(TypeError, match=r"cache must be the cache of a layer, or None; got Cache\."):
        mha(x, cache=Cache([KVCache()]))
    with pytest.raises(ValueError, match="key and value must be None with a KVCache"):
        mha(x, x, cache=KVCache())
    with pytest.raises(ValueError, match="kv_positions must be None with a KVCache"):
        mha(x, kv_positions=range(3), cache=KVCache())
    with pytest.raises(ValueError, match="mask must be a rule on positions with a cache"):
        mha(x, mask=torch.ones(3, 3, dtype=torch.bool), cache=KVCache())
    with pytest.raises(ValueError, match="key must be given in the first call with a CrossCache"):
        mha(x, cache=CrossCache())
    cache = CrossCache()
    mha(x, x, cache=cache)
    with pytest.raises(ValueError, match=re.escape("key must have shape [2, 3, 16], as the context in the cache")):
        mha(x, x[:, :2], cache=cache)
    with pytest.raises(ValueError, match="kv_positions must be given only in the first call with a CrossCache"):
        mha(x, kv_positions=range(3), cache=cache)
    with pytest.raises(ValueError, match="batch must be the same for all inputs"):
        mha(x[:1].expand(3, 3, 16), x, cache=CrossCache())


def test_blocks_hand_the_cache_on() -> None:
    block = AttentionBlock(16, 4, mask=CAUSAL).eval()
    x, cache = torch.randn(2, 5, 16), KVCache()
    out = torch.cat([block(part, cache=cache) for part in x.split([3, 1, 1], 1)], 1)
    torch.testing.assert_close(out, block(x))


def test_the_joined_mask_is_read_at_positions() -> None:
    mha = MultiHeadAttention(16, 4, mask=CAUSAL).eval()
    x, cache = torch.randn(1, 6, 16), KVCache()
    facts = masks.Documents([2, 4])
    out = torch.cat([mha(part, cache=cache, mask=facts) for part in x.split([3, 1, 2], 1)], 1)
    torch.testing.assert_close(out, mha(x, mask=facts))


def test_one_s_own_cache_needs_only_the_protocol() -> None:
    class Forgetful(KVCache):
        """Remembers the last call only."""

        def attend(self, *args: object, **kwargs: object) -> Tensor:
            self.crop(0)
            return super().attend(*args, **kwargs)

    mha = MultiHeadAttention(16, 4, mask=CAUSAL).eval()
    cache = Forgetful()
    assert isinstance(cache, LayerCache)
    x = torch.randn(1, 4, 16)
    mha(x[:, :2], cache=cache)
    torch.testing.assert_close(mha(x[:, 2:], cache=cache), mha(x[:, 2:]))
