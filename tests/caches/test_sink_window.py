"""SinkWindowCache: with positions left alone a streaming mask, with positions counted inside the cache a short text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.caches.expected_masks import BIASES, HEAD_DIM, HEADS, RULES, TOTAL, WIDTH
from torch import Tensor

from saccade import masks
from saccade.caches import SinkWindowCache, padded_positions
from saccade.mechanisms import Linear, Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import Rotary, YaRN


def _layer(rule: masks.Mask, name: str = "plain", rotary: Rotary | None = None) -> MultiHeadAttention:
    torch.manual_seed(0)
    mha = MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, mask=rule, mechanism=BIASES[name](), rotary=rotary)
    return mha.double().eval().requires_grad_(False)


def _in_parts(mha: MultiHeadAttention, x: Tensor, sizes: list[int], cache: SinkWindowCache) -> Tensor:
    return torch.cat([mha(part, cache=cache) for part in x.split(sizes, 1)], 1)


def _sizes(data: st.DataObject) -> list[int]:
    sizes = [data.draw(st.sampled_from([1, 2, 7, 15]))]
    while sum(sizes) < TOTAL:
        sizes.append(min(data.draw(st.sampled_from([1, 1, 1, 3, 9])), TOTAL - sum(sizes)))
    return sizes


def _inside(
    mha: MultiHeadAttention, x: Tensor, sinks: int, window: int, alibi: Tensor | None = None, stride: int = 1
) -> Tensor:
    """The definition: each token alone with the tokens held, which stand at 0, 1, 2, …, in plain operations."""
    q, k, v = (
        own(x).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
        for own in (mha.query_projection, mha.key_projection, mha.value_projection)
    )
    out = []
    for p in range(x.shape[1]):
        held = [j for j in range(p + 1) if j < sinks or j > p - window]
        keys = mha.rotary(k[:, :, held], range(len(held))).repeat_interleave(2, 1)
        query = mha.rotary(q[:, :, p : p + 1], range(len(held) - 1, len(held)))
        scores = query @ keys.mT * HEAD_DIM**-0.5
        if alibi is not None:
            scores = scores - alibi[:, None, None] * (len(held) - 1 - torch.arange(len(held)))
        scores = scores.masked_fill((len(held) - 1 - torch.arange(len(held))) % stride != 0, -torch.inf)
        out.append(scores.softmax(-1) @ v[:, :, held].repeat_interleave(2, 1))
    return mha.output_projection(torch.cat(out, 2).transpose(1, 2).flatten(2))


@pytest.mark.ci
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_it_is_the_dense_run_with_a_streaming_mask(data: st.DataObject) -> None:
    sinks, window = data.draw(st.sampled_from([0, 1, 3])), data.draw(st.sampled_from([1, 4, 30]))
    rule = data.draw(st.sampled_from(RULES))
    name = data.draw(st.sampled_from(sorted(BIASES)))
    mha = _layer(rule, name, Rotary(HEAD_DIM) if data.draw(st.booleans()) else None)
    x = torch.randn(3, TOTAL, WIDTH, dtype=torch.float64)
    cache = SinkWindowCache(sinks, window)
    out = _in_parts(mha, x, _sizes(data), cache)
    torch.testing.assert_close(out, mha(x, mask=masks.streaming(sinks, window)))
    assert cache.length == TOTAL
    assert cache.positions(1) == range(TOTAL, TOTAL + 1)
    expected = [j for j in range(TOTAL) if j < sinks or j >= TOTAL - window]
    assert sorted(cache.kv_positions[0].tolist()) == [-1] * (sinks + window - len(expected)) + expected


@pytest.mark.ci
@settings(deadline=None, max_examples=30)
@given(st.data())
def test_positions_inside_the_cache_are_those_of_a_short_text(data: st.DataObject) -> None:
    sinks, window = data.draw(st.sampled_from([0, 1, 3])), data.draw(st.sampled_from([1, 4, 30]))
    scaling = data.draw(st.sampled_from([None, YaRN(4.0, trained_len=64)]))
    layout = data.draw(st.sampled_from(["half", "interleaved"]))
    name = data.draw(st.sampled_from(["plain", "alibi"]))
    stride = data.draw(st.sampled_from([1, 1, 2, 3]))
    rule = masks.Causal() & masks.Strided(stride)
    mha = _layer(rule, name, Rotary(HEAD_DIM, scaling=scaling, layout=layout))
    x = torch.randn(2, TOTAL, WIDTH, dtype=torch.float64)
    out = _in_parts(mha, x, _sizes(data), SinkWindowCache(sinks, window, rotary=mha.rotary))
    slopes = 2.0 ** (-8.0 * torch.arange(1, HEADS + 1) / HEADS) if name == "alibi" else None
    torch.testing.assert_close(out, _inside(mha, x, sinks, window, slopes, stride))


SPLIT = [9, 1, 1, 1, 6, 1, 1, 3]


@pytest.mark.parametrize("sinks, window", [(0, 1), (0, 4), (1, 4), (3, 1), (3, 4), (2, 6), (2, 9)])
@pytest.mark.parametrize("name, stride", [("plain", 1), ("alibi", 2), ("plain", 3)])
def test_one_split_inside_the_cache_is_a_short_text(name: str, stride: int, sinks: int, window: int) -> None:
    mha = _layer(masks.Causal() & masks.Strided(stride), name, Rotary(HEAD_DIM))
    x = torch.randn(2, TOTAL, WIDTH, dtype=torch.float64)
    slopes = 2.0 ** (-8.0 * torch.arange(1, HEADS + 1) / HEADS) if name == "alibi" else None
    out = _in_parts(mha, x, SPLIT, SinkWindowCache(sinks, window, rotary=mha.rotary))
    torch.testing.assert_close(out, _inside(mha, x, sinks, window, slopes, stride))


def test_the_output_has_the_dtype_of_values() -> None:
    given = [torch.randn(1, 2, 12, 4).bfloat16() for _ in range(3)]
    assert SinkWindowCache(1, 4, rotary=Rotary(4)).attend(Softmax(), *given).dtype == torch.bfloat16


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_one_split_is_the_dense_run(name: str, rule: masks.Mask) -> None:
    mha, x = _layer(rule, name), torch.randn(2, TOTAL, WIDTH, dtype=torch.float64)
    expected = mha(x, mask=masks.streaming(2, 6))
    torch.testing.assert_close(_in_parts(mha, x, SPLIT, SinkWindowCache(2, 6)), expected)


@pytest.mark.parametrize("inside", [False, True])
def test_items_of_a_ragged_batch_are_what_each_is_alone(inside: bool) -> None:
    mha = _layer(masks.Causal(), rotary=Rotary(HEAD_DIM))
    x = torch.randn(3, TOTAL, WIDTH, dtype=torch.float64)
    lengths = [9, 4, 1]
    positions = padded_positions(lengths, side="left")
    padded = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    for b, length in enumerate(lengths):
        padded[b, positions[b] >= 0] = x[b, :length]
    cache = SinkWindowCache(2, 4, rotary=mha.rotary if inside else None)
    out = mha(padded, positions=positions, cache=cache)
    full = _inside(mha, x, 2, 4) if inside else mha(x, mask=masks.streaming(2, 4))
    for b, length in enumerate(lengths):
        torch.testing.assert_close(out[b, positions[b] >= 0], full[b, :length])
    ended = torch.tensor([[9], [-1], [1]])
    out = mha(torch.stack([x[0, 9], x[1, 0], x[2, 1]])[:, None], positions=ended, cache=cache)
    torch.testing.assert_close(out[[0, 2], 0], torch.stack([full[0, 9], full[2, 1]]))
    assert cache.positions(1).tolist() == [[10], [4], [2]]
    out = mha(torch.stack([x[0, 10:14], x[1, 4:8], x[2, 2:6]]), cache=cache)
    torch.testing.assert_close(out, torch.stack([full[0, 10:14], full[1, 4:8], full[2, 2:6]]))
    cache.reorder([2, 0])
    for step in range(6):
        out = mha(torch.stack([x[2, 6 + step], x[0, 14 + step]])[:, None], cache=cache)
        torch.testing.assert_close(out[:, 0], torch.stack([full[2, 6 + step], full[0, 14 + step]]))


@pytest.mark.parametrize("inside", [False, True])
def test_forks_reordered_and_cropped_caches_go_on_as_if_alone(inside: bool) -> None:
    mha = _layer(masks.Causal(), rotary=Rotary(HEAD_DIM))
    x = torch.randn(3, TOTAL, WIDTH, dtype=torch.float64)
    full = _inside(mha, x, 2, 4) if inside else mha(x, mask=masks.streaming(2, 4))
    cache = SinkWindowCache(2, 4, rotary=mha.rotary if inside else None)
    mha(x[:, :5], cache=cache)
    mha(x[:, 20:21], cache=cache)  # a guess that is taken back
    cache.crop(5)
    assert sorted(cache.kv_positions[0].tolist()) == [-1, 0, 1, 2, 3, 4]
    out = [mha(x[:, i : i + 1], cache=cache) for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(out, 1), full[:, 5:12])
    again = SinkWindowCache(2, 4, rotary=mha.rotary if inside else None)
    mha(x[:, :6], cache=again)
    again.crop(5)
    torch.testing.assert_close(mha(x[:, 5:9], cache=again), full[:, 5:9])
    other = cache.fork()
    noise = torch.randn(3, 1, WIDTH, dtype=torch.float64)
    for _ in range(3):
        mha(noise, cache=cache)
    other.reorder([2, 2])
    torch.testing.assert_close(mha(x[[2, 2], 12:13], cache=other), full[[2, 2], 12:13])
    torch.testing.assert_close(mha(x[[2, 2], 13:], cache=other), full[[2, 2], 13:])
    with pytest.raises(NotImplementedError, match=r"(?s)it has evicted tokens that were in the window 3 tokens ago"):
        cache.crop(12)
    assert cache.length == 15
    cache.crop(0)
    torch.testing.assert_close(mha(x[:, :9], cache=cache), full[:, :9])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["plain", "alibi"])
def test_a_call_reads_the_slots_in_use_and_its_own_tokens(name: str, inside: bool) -> None:
    q, k, v = torch.randn(2, HEADS, 11, 4), torch.randn(2, 2, 11, 4), torch.randn(2, 2, 11, 3)
    cache, token = SinkWindowCache(2, 4, rotary=Rotary(4) if inside else None), 2 * 2 * (4 + 3) * 4
    for start, stop in ((0, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 10), (10, 11)):
        cache.attend(BIASES[name](), *(x[:, :, start:stop] for x in (q, k, v)), mask=masks.Causal())
        new = stop - start
        held = min(stop, 6) if new == 1 else 6 + new if start else new
        assert cache.traffic == (held * token, new * token)
    ragged = SinkWindowCache(2, 4)
    for i in range(2):
        own = [x[:, :, i : i + 1] for x in (q, k, v)]
        ragged.attend(BIASES[name](), *own, mask=masks.Causal(), positions=torch.tensor([[i], [-1]]))
    assert ragged.traffic == (6 * token, token)


def test_bytes_are_those_of_the_tensors_however_long_the_text() -> None:
    q, k, v = (torch.randn(2, own, 40, 8) for own in (4, 2, 2))
    cache, token = SinkWindowCache(2, 6), 2 * 2 * 8 * 4 * 2
    assert (cache.nbytes, cache.traffic) == (0, (0, 0))
    for i in range(40):
        cache.attend(Softmax(), *(x[:, :, i : i + 1] for x in (q, k, v)))
        assert cache.nbytes == 8 * token + 8 * 8
        assert cache.traffic == (min(i + 1, 8) * token, token)
    turning = SinkWindowCache(2, 6, rotary=Rotary(8))
    turning.attend(Softmax(), q, k, v)
    assert turning.nbytes == 8 * token + 8 * 8 + 2 * 2 * 2 * 8 * 4


def test_a_turned_key_is_turned_once_however_long_the_stream() -> None:
    rotary = Rotary(8)
    k = torch.randn(1, 1, 400, 8, dtype=torch.bfloat16)
    cache = SinkWindowCache(2, 6, rotary=rotary)
    for i in range(400):
        own = rotary(k[:, :, i : i + 1], range(i, i + 1))
        cache.attend(Softmax(), own, own, own)
    first = rotary(k[:, :, :2], range(2))
    expected = rotary(rotary.unrotate(first, range(2)), range(392, 394))
    torch.testing.assert_close(cache._state["keys"][:, :, :2], expected, atol=0, rtol=0)


def test_a_call_that_fails_leaves_no_trace() -> None:
    mha = _layer(masks.Causal(), rotary=Rotary(HEAD_DIM))
    x = torch.randn(1, TOTAL, WIDTH, dtype=torch.float64)
    cache, own = SinkWindowCache(1, 3, rotary=mha.rotary), SinkWindowCache(1, 3, rotary=mha.rotary)
    for one in (cache, own):
        mha(x[:, :9], cache=one)

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("stopped")

    q, k, v = torch.randn(1, 4, 1, 4).double(), torch.randn(1, 2, 1, 4).double(), torch.randn(1, 2, 1, 4).double()
    with pytest.raises(RuntimeError, match="stopped"):
        cache.attend(fails, q, k, v)
    for part in x[:, 9:14].split([2, 1, 1, 1], 1):
        torch.testing.assert_close(mha(part, cache=cache), mha(part, cache=own))


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_reach_the_new_token(inside: bool) -> None:
    cache = SinkWindowCache(1, 3, rotary=Rotary(4) if inside else None)
    past = [torch.randn(1, 1, 6, 4).double() for _ in range(3)]
    cache.attend(Softmax(), *past)
    fork = cache.fork()
    new = [torch.randn(1, 1, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = cache.attend(Softmax(), *new)
    cache.attend(Softmax(), *(x.detach() + 1 for x in new))  # what is written now must not spoil the graph
    out.pow(2).sum().backward()

    def product(*own: Tensor) -> Tensor:
        return fork.fork().attend(Softmax(), *own).pow(2).sum()

    plain = [x.detach() for x in new]
    for which, x in enumerate(new):
        for channel in range(4):
            step = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
            step[..., channel] = 1e-6
            up, down = list(plain), list(plain)
            up[which], down[which] = plain[which] + step, plain[which] - step
            slope = (product(*up) - product(*down)) / 2e-6
            torch.testing.assert_close(x.grad[0, 0, 0, channel], slope, atol=1e-7, rtol=1e-6)


def test_impossible_arguments_are_refused_before_writing() -> None:
    with pytest.raises(ValueError, match="SinkWindowCache: sink_tokens must be an int of at least 0; got -1"):
        SinkWindowCache(-1, 4)
    with pytest.raises(ValueError, match="window must be an int of at least 1; got 0"):
        SinkWindowCache(1, 0)
    with pytest.raises(TypeError, match="rotary must be a saccade Rotary or None; got float"):
        SinkWindowCache(1, 4, rotary=1.0)
    q = torch.randn(1, 1, 9, 4)
    cache = SinkWindowCache(1, 3, rotary=Rotary(4))
    with pytest.raises(NotImplementedError, match="depends on more than distances"):
        cache.attend(Softmax(), q, q, q, mask=masks.Documents([4, 5]))
    with pytest.raises(NotImplementedError, match="the tokens are not at positions 0, 1, 2"):
        cache.attend(Softmax(), q, q, q, positions=range(4, 13))
    with pytest.raises(NotImplementedError, match="merges two softmaxes"):
        cache.attend(Softmax(sink_logit=1), q, q, q)
    with pytest.raises(NotImplementedError, match="queries cannot choose among keys"):
        cache.attend(Linear(), q, q, q, mask=masks.Causal())
    with pytest.raises(ValueError, match="rotary must be made for head_dim 6; got 4"):
        cache.attend(Softmax(), *[torch.randn(1, 1, 2, 6)] * 3)
    assert (cache.length, cache.nbytes) == (0, 0)
    plain = SinkWindowCache(1, 3)
    plain.attend(Softmax(), q, q, q)
    with pytest.raises(ValueError, match="positions must increase and come after those in the cache"):
        plain.attend(Softmax(), q, q, q, positions=range(9))
    with pytest.raises(ValueError, match="batch of key must be 1, as in the cache; got 2"):
        plain.attend(Softmax(), *[torch.randn(2, 1, 2, 4)] * 3)
    with pytest.raises(ValueError, match="must be a rule on positions"):
        plain.attend(Softmax(), q, q, q, mask=torch.ones(9, 9, dtype=torch.bool))
