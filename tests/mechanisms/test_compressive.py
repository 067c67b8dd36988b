"""CompressiveMemory is a loop over segments, and its cache goes on with any split of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mechanisms.segment_definition import by_segments
from tests.sampled import sampled
from torch import Tensor

import saccade as sc
from saccade.caches import CompressiveCache, KVCache, load_cache, padded_positions, save_cache
from saccade.masks import Causal, Padding, Segments, sliding_window
from saccade.mechanisms import CompressiveMemory, Linear, Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import Rotary

TOTAL, WIDTH = 23, 16
UPDATES = ["linear", "delta"]
SEGMENTS = [1, 4, 5, 23, 30]


def _memory(segment: int = 4, update: str = "delta", heads: int = 4, **options: object) -> CompressiveMemory:
    torch.manual_seed(0)
    made = CompressiveMemory(heads, segment, update=update, **options).double()
    torch.nn.init.normal_(made.gate)
    return made


def _qkv(length: int = TOTAL, kv_heads: int = 2, batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, heads, length, 6, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]


def _close(own: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(own, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.ci
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("segment", sampled(SEGMENTS, 2))
@pytest.mark.parametrize("update", UPDATES)
def test_products_rows_and_the_dense_matrix_are_the_loop(update: str, segment: int, kv_heads: int) -> None:
    (q, k, v), memory = _qkv(kv_heads=kv_heads), _memory(segment, update)
    expected = by_segments(q, k, v, memory.gate.sigmoid(), segment, update)
    whole, x = v.repeat_interleave(4 // kv_heads, 1), torch.randn(2, 4, TOTAL, 3, dtype=torch.float64)
    table = torch.arange(TOTAL).expand(2, -1)  # the same said otherwise, which goes another way
    for where in ({}, {"q_positions": table, "kv_positions": table}):
        A = memory(q, k, mask=Causal(), **where)
        _close(A @ v, expected)
        dense = A.to_dense()
        _close(dense @ whole, expected)
        _close(torch.stack([A[1, 2, i] for i in range(TOTAL)]), dense[1, 2])
        _close(A.mT @ x, dense.mT @ x)
        _close(A.received(), dense.sum(2))


@pytest.mark.parametrize("update", UPDATES)
def test_gradients_are_those_of_the_loop(update: str) -> None:
    given, memory = [x.requires_grad_() for x in _qkv(11)], _memory(3, update)
    inputs = [*given, memory.gate]
    own = torch.autograd.grad((memory(*given[:2], mask=Causal()) @ given[2]).sin().sum(), inputs)
    loop = by_segments(*given, memory.gate.sigmoid(), 3, update).sin().sum()
    for x, wanted in zip(own, torch.autograd.grad(loop, inputs), strict=True):
        _close(x, wanted)
    x = torch.randn(2, 4, 11, 3, dtype=torch.float64)
    A = memory(*given[:2], mask=Causal())
    turned = torch.autograd.grad((A.mT @ x).sin().sum(), inputs[:2])
    dense = by_segments(*given[:2], torch.eye(11).double().expand(2, 2, -1, -1), memory.gate.sigmoid(), 3, update)
    for own_grad, wanted in zip(turned, torch.autograd.grad((dense.mT @ x).sin().sum(), inputs[:2]), strict=True):
        _close(own_grad, wanted)


def test_the_linear_update_is_a_sum_of_linear_attention_and_softmax() -> None:
    (q, k, v), memory, at = _qkv(), _memory(4, "linear"), torch.arange(TOTAL)
    # A query that stands at the end of the segment before its own sees all segments before its own.
    earlier = Linear()(q, k, mask=Causal(), q_positions=at // 4 * 4 - 1, kv_positions=at)
    own, gate = Softmax()(q, k, mask=Segments(4, 0)), memory.gate.sigmoid()[:, None, None]
    A = memory(q, k, mask=Causal())
    _close(A @ v, (gate * earlier + (1 - gate) * own) @ v)
    rows = A.to_dense().sum(3)
    _close(rows[:, :, 4:], torch.ones_like(rows[:, :, 4:]))
    _close(rows[:, :, :4], (1 - gate[..., 0]).expand(2, -1, 4))
    assert not A.is_stochastic


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_split_is_the_full_run_and_that_of_a_kv_cache(data: st.DataObject) -> None:
    memory = _memory(data.draw(st.sampled_from(SEGMENTS)), data.draw(st.sampled_from(UPDATES)))
    rotary = Rotary(4) if data.draw(st.booleans()) else None
    memory.rotary = Rotary(4) if data.draw(st.booleans()) else None
    mask = data.draw(st.sampled_from([Causal(), Causal() & Padding([TOTAL, 9, 15])]))
    layer = MultiHeadAttention(WIDTH, 4, num_kv_heads=2, mask=mask, mechanism=memory, rotary=rotary).double().eval()
    x = torch.randn(3, TOTAL, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        full, cache, other, start = layer(x), layer.mechanism.new_cache(), KVCache(), 0
        for size in data.draw(st.lists(st.integers(0, 12), max_size=8)):
            stop = min(start + size, TOTAL)
            out = layer(x[:, start:stop], cache=cache)
            _close(out, full[:, start:stop])
            _close(out, layer(x[:, start:stop], cache=other))
            start = stop
            assert cache.kv_positions.shape[1] <= memory.segment
    assert (cache.length, cache.positions(1)) == (start, range(start, start + 1))


@pytest.mark.ci
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_items_of_a_ragged_batch_have_segments_of_their_own(data: st.DataObject) -> None:
    memory = _memory(data.draw(st.sampled_from(SEGMENTS)), data.draw(st.sampled_from(UPDATES)))
    layer = MultiHeadAttention(WIDTH, 4, num_kv_heads=2, mask=Causal(), mechanism=memory, rotary=Rotary(4)).double()
    layer, x = layer.eval().requires_grad_(False), torch.randn(3, TOTAL, WIDTH, dtype=torch.float64)
    full = torch.cat([layer(own[None]) for own in x])
    done = data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any))
    positions = padded_positions(done, side=data.draw(st.sampled_from(["left", "right"])))
    cache, rows = memory.new_cache(), [0, 1, 2]
    for number in range(5):
        new = torch.full((len(rows), positions.shape[1], WIDTH), 7.0, dtype=x.dtype)
        for b, row in enumerate(rows):
            new[b, positions[b] >= 0] = x[row, positions[b][positions[b] >= 0]]
        out = layer(new, positions=positions, cache=cache)
        for b, row in enumerate(rows):
            _close(out[b, positions[b] >= 0], full[row, positions[b][positions[b] >= 0]])
        assert cache.kv_positions.shape[1] <= memory.segment
        if number == 2:
            cache.reorder([2, 0])
            rows, done = [2, 0], [done[2], done[0]]
        size = data.draw(st.integers(0, 4))
        takes = [min(TOTAL - start, data.draw(st.integers(0, size))) for start in done]  # some items end earlier
        positions = torch.full((len(rows), size), -1)
        for b, (start, count) in enumerate(zip(done, takes, strict=True)):
            positions[b, :count] = torch.arange(start, start + count)
        done = [start + count for start, count in zip(done, takes, strict=True)]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_from_a_file_continues_unchanged(ragged: bool, tmp_path) -> None:
    (q, k, v), memory = _qkv(), _memory()
    cache, where = memory.new_cache(), padded_positions([10, 6], side="left") if ragged else None
    cache.attend(memory, *(x[:, :, :10] for x in (q, k, v)), mask=Causal(), positions=where)
    save_cache(cache, tmp_path / "cache")
    other = load_cache(tmp_path / "cache")
    assert (type(other), other.length, repr(other.positions(2))) == (CompressiveCache, 10, repr(cache.positions(2)))
    own, read = (one.attend(memory, *(x[:, :, 10:] for x in (q, k, v)), mask=Causal()) for one in (cache, other))
    torch.testing.assert_close(own, read, atol=0, rtol=0)
    empty = CompressiveCache(30)
    save_cache(empty, tmp_path / "cache")
    assert repr(load_cache(tmp_path / "cache")) == "CompressiveCache(max_len=30, length=0, nbytes=0)"


def test_bytes_do_not_grow() -> None:
    (q, k, v), memory, cache = _qkv(40), _memory(), CompressiveCache()
    token, state, sizes = 2 * 2 * 12 * 8, 2 * 2 * 6 * 7 * 8, []
    for i in range(40):
        cache.attend(memory, *(x[:, :, i : i + 1] for x in (q, k, v)), mask=Causal())
        sizes.append(cache.nbytes)
        held = (i - 1) % 4 + 1 if i else 0  # a segment is written when the next one begins
        assert cache.traffic == ((held + 1) * token + (state if i >= 4 else 0), token)
    held = [(i % 4 + 1) * (token + 8) + (state if i >= 4 else 0) for i in range(40)]
    assert sizes == held


def test_forks_go_their_own_ways_and_nothing_is_taken_back() -> None:
    (q, k, v), memory, cache = _qkv(), _memory(), CompressiveCache()
    full = memory(q, k, mask=Causal()) @ v
    cache.attend(memory, *(x[:, :, :6] for x in (q, k, v)), mask=Causal())
    guess = cache.fork()
    guess.attend(memory, *_qkv(7), mask=Causal())
    _close(cache.attend(memory, *(x[:, :, 6:] for x in (q, k, v)), mask=Causal()), full[:, :, 6:])
    with pytest.raises(sc.UnsupportedError, match="one sum over the segments of 13 tokens"):
        guess.crop(5)
    guess.crop(0)
    _close(guess.attend(memory, *(x[:, :, :5] for x in (q, k, v)), mask=Causal()), full[:, :, :5])


def test_gradients_reach_the_tokens_of_the_call_only() -> None:
    (q, k, v), memory, cache = [x.requires_grad_() for x in _qkv(11)], _memory(), CompressiveCache()
    for a, b in ((0, 6), (6, 11)):
        out = cache.attend(memory, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], mask=Causal())
    *grads, gate = torch.autograd.grad(out.sin().sum(), (q, k, v, memory.gate))
    held = [torch.cat([x[:, :, :6].detach(), x[:, :, 6:]], 2) for x in (k, v)]
    loop = by_segments(q, *held, memory.gate.sigmoid(), 4, "delta")[:, :, 6:].sin().sum()
    for own, wanted in zip((*grads, gate), torch.autograd.grad(loop, (q, k, v, memory.gate)), strict=True):
        _close(own, wanted)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_a_nan_is_remembered_by_those_that_see_it(where: str, update: str) -> None:
    (q, k, v), memory = _qkv(12, 4), _memory(4, update)
    clean = by_segments(q, k, v, memory.gate.sigmoid(), 4, update)
    {"query": q, "key": k, "value": v}[where][0, 1, 2] = math.nan
    bad = torch.zeros(2, 4, 12, dtype=torch.bool)
    bad[0, 1, 2 : 3 if where == "query" else 12] = True
    for steps in ([12], [3, 1, 5, 1, 1, 1]):
        cache = CompressiveCache()
        parts = zip(*(x.split(steps, 2) for x in (q, k, v)), strict=True)
        out = torch.cat([cache.attend(memory, *part, mask=Causal()) for part in parts], 2)
        assert out[bad].isnan().all()
        _close(out[~bad], clean[~bad])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_kept_in_float32(dtype: torch.dtype) -> None:
    q, k, v = _qkv(400)
    memory, cache = _memory(16), CompressiveCache()
    expected = by_segments(q, k, v, memory.gate.sigmoid(), 16, "delta")
    parts = zip(*(x.to(dtype).split([100, 1, 299], 2) for x in (q, k, v)), strict=True)
    out = torch.cat([cache.attend(memory.to(dtype), *part, mask=Causal()) for part in parts], 2)
    assert (out.dtype, cache._state["memory"].dtype) == (dtype, torch.float32)
    assert (out - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


def test_a_layer_learns_with_it() -> None:
    torch.manual_seed(0)
    memory = CompressiveMemory(4, 4, update="delta", rotary=Rotary(4))
    layer, x = MultiHeadAttention(WIDTH, 4, mask=Causal(), mechanism=memory), torch.randn(2, 20, WIDTH)
    target, losses = x.roll(6, 1), []
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(30):
        losses.append((layer(x) - target)[:, 6:].square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert (memory.gate != 0).all()


def test_unsupported_arguments_are_refused() -> None:
    (q, k, v), memory, cache = _qkv(5), _memory(), CompressiveCache()
    with pytest.raises(
        sc.UnsupportedError, match="Window is neither Causal nor Padding: a memory stores whole segments"
    ):
        cache.attend(memory, q, k, v, mask=sliding_window(3))
    with pytest.raises(sc.UnsupportedError, match="Full is not causal: a segment is read after it was written"):
        cache.attend(memory, q, k, v)
    for other, name in ((Softmax(), "AttentionMatrix"), (Linear(), "FeatureMatrix")):
        with pytest.raises(sc.UnsupportedError, match=f"- {name} cannot be continued as a sum over segments"):
            cache.attend(other, q, k, v, mask=Causal())
    with pytest.raises(sc.UnsupportedError, match="individual weights of earlier tokens cannot be dropped from a sum"):
        cache.attend(memory, q, k, v, mask=Causal(), dropout_p=0.1)
    with pytest.raises(ValueError, match="CompressiveMemory: heads of query must be num_heads 4; got 2"):
        memory(q[:, :2], k, mask=Causal())
    for wrong, sentence in (
        ({"segment": 0}, "segment must be an int of at least 1; got 0"),
        ({"num_heads": 0}, "num_heads must be an int of at least 1; got 0"),
        ({"update": "gated"}, "update must be one of 'linear', 'delta'; got 'gated'"),
        ({"rotary": 3.0}, "rotary must be a saccade Rotary or None; got float"),
    ):
        with pytest.raises(ValueError, match=f"CompressiveMemory: {sentence}"):
            CompressiveMemory(**{"num_heads": 4, "segment": 4} | wrong)
    assert (cache.length, cache.nbytes) == (0, 0)
