"""SegmentCache: any split of a text into calls is the dense run with a mask of segments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.caches.expected_masks import BIASES, HEAD_DIM, HEADS, RULES, TOTAL, WIDTH
from torch import Tensor

from saccade import masks
from saccade.caches import SegmentCache, padded_positions
from saccade.mechanisms import Linear, Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import Rotary
from saccade.testing import oracle

SIZES = [(1, 0), (1, 4), (4, 0), (4, 3), (3, 5), (30, 2)]


def _layer(rule: masks.Mask, name: str = "plain", *, rotary: bool = True) -> MultiHeadAttention:
    torch.manual_seed(0)
    turned = Rotary(HEAD_DIM) if rotary else None
    mha = MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, mask=rule, mechanism=BIASES[name](), rotary=turned)
    return mha.double().eval().requires_grad_(False)


def _by_segments(query: Tensor, key: Tensor, value: Tensor, segment: int, memory: int) -> Tensor:
    """The definition, a segment at a time: it sees itself, causally, and the last tokens before it."""
    out = []
    for start in range(0, query.shape[2], segment):
        own = slice(max(0, start - memory), start + segment)
        allowed = torch.ones(own.stop, own.stop, dtype=torch.bool).tril()[start:, own.start :]
        rows, k, v = query[:, :, start : own.stop], key[:, :, own], value[:, :, own]
        out.append(oracle.attention(rows, k, v, allowed[: rows.shape[2], : k.shape[2]].expand(*rows.shape[:3], -1))[0])
    return torch.cat(out, 2)


@pytest.mark.parametrize("segment, memory", SIZES)
def test_it_is_the_definition_a_segment_at_a_time(segment: int, memory: int) -> None:
    q = torch.randn(2, 4, TOTAL, 4, dtype=torch.float64)
    k, v = (torch.randn(2, 2, TOTAL, 4, dtype=torch.float64) for _ in range(2))
    expected, cache = _by_segments(q, k, v, segment, memory), SegmentCache(segment, memory)
    parts = zip(*(x.split([5, 1, 1, 7, 1, 8], 2) for x in (q, k, v)), strict=True)
    out = torch.cat([cache.attend(Softmax(), *part) for part in parts], 2)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(Softmax()(q, k, mask=masks.Segments(segment, memory)) @ v, expected)


@pytest.mark.ci
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_split_is_the_dense_run(data: st.DataObject) -> None:
    segment, memory = data.draw(st.sampled_from(SIZES))
    rule, name = data.draw(st.sampled_from(RULES)), data.draw(st.sampled_from(sorted(BIASES)))
    mha = _layer(rule, name, rotary=data.draw(st.booleans()))
    x, cache, sizes = torch.randn(3, TOTAL, WIDTH, dtype=torch.float64), SegmentCache(segment, memory), [0]
    while sum(sizes) < TOTAL:
        sizes.append(min(data.draw(st.sampled_from([1, 1, 1, 2, 7, 15])), TOTAL - sum(sizes)))
    out = torch.cat([mha(part, cache=cache) for part in x.split(sizes, 1)], 1)
    expected = mha(x, mask=masks.Segments(segment, memory))
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    assert cache.positions(1) == range(TOTAL, TOTAL + 1)
    held = [j for j in cache.kv_positions[0].tolist() if j >= 0]
    assert len(held) <= segment + memory
    assert set(range(max(0, TOTAL // segment * segment - memory), TOTAL)) <= set(held)


def test_items_of_a_ragged_batch_have_segments_of_their_own() -> None:
    mha, x, lengths = _layer(masks.Causal()), torch.randn(3, TOTAL, WIDTH, dtype=torch.float64), [9, 4, 1]
    positions = padded_positions(lengths, side="left")
    padded = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    for b, length in enumerate(lengths):
        padded[b, positions[b] >= 0] = x[b, :length]
    cache, full = SegmentCache(4, 3), mha(x, mask=masks.Segments(4, 3))
    out = mha(padded, positions=positions, cache=cache)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(out[b, positions[b] >= 0], full[b, :length])
    ended = torch.tensor([[9], [-1], [1]])
    out = mha(torch.stack([x[0, 9], x[1, 0], x[2, 1]])[:, None], positions=ended, cache=cache)
    torch.testing.assert_close(out[[0, 2], 0], torch.stack([full[0, 9], full[2, 1]]))
    out = mha(torch.stack([x[0, 10:15], x[1, 4:9], x[2, 2:7]]), cache=cache)
    torch.testing.assert_close(out, torch.stack([full[0, 10:15], full[1, 4:9], full[2, 2:7]]))
    cache.reorder([2, 0])
    for step in range(6):
        out = mha(torch.stack([x[2, 7 + step], x[0, 15 + step]])[:, None], cache=cache)
        torch.testing.assert_close(out[:, 0], torch.stack([full[2, 7 + step], full[0, 15 + step]]))


def test_forks_and_cropped_caches_go_on_as_if_alone() -> None:
    mha, x, cache = _layer(masks.Causal()), torch.randn(3, TOTAL, WIDTH, dtype=torch.float64), SegmentCache(4, 2)
    full = mha(x, mask=masks.Segments(4, 2))
    mha(x[:, :5], cache=cache)
    mha(x[:, 20:21], cache=cache)  # a guess that is taken back
    cache.crop(5)
    torch.testing.assert_close(torch.cat([mha(x[:, i : i + 1], cache=cache) for i in range(5, 12)], 1), full[:, 5:12])
    other = cache.fork()
    for _ in range(3):
        mha(torch.randn(3, 1, WIDTH, dtype=torch.float64), cache=cache)
    torch.testing.assert_close(mha(x[:, 12:], cache=other), full[:, 12:])
    with pytest.raises(NotImplementedError, match=r"SegmentCache\.crop: length=12 (.|\n)*it has evicted tokens"):
        cache.crop(12)
    cache.crop(0)
    torch.testing.assert_close(mha(x[:, :9], cache=cache), full[:, :9])


def test_bytes_do_not_grow() -> None:
    q, k, v = (torch.randn(2, own, 40, 8) for own in (4, 2, 2))
    cache, token = SegmentCache(4, 2), 2 * 2 * 8 * 4 * 2
    for i in range(40):
        cache.attend(Softmax(), *(x[:, :, i : i + 1] for x in (q, k, v)))
        assert cache.nbytes == 6 * token + 6 * 8
        assert cache.traffic == (((i % 4 + 1) + (2 if i >= 4 else 0)) * token, token)


def test_gradients_reach_the_own_segment_and_stop_at_the_memory() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cache = SegmentCache(4, 2)
    first, second = (cache.attend(Softmax(), *(x[:, :, a : a + 4] for x in (q, k, v))) for a in (0, 4))
    grads = torch.autograd.grad(second.sin().sum(), (q, k, v))
    held = [torch.cat([x[:, :, :4].detach(), x[:, :, 4:]], 2) for x in (k, v)]
    dense = Softmax()(q[:, :, 4:], held[0], mask=masks.Segments(4, 2)) @ held[1]
    for own, expected in zip(grads, torch.autograd.grad(dense.sin().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(own, expected)
        assert not own[:, :, :4].any()
    assert first.requires_grad


def test_impossible_arguments_are_refused_before_writing() -> None:
    with pytest.raises(ValueError, match="SegmentCache: segment must be an int of at least 1; got 0"):
        SegmentCache(0, 4)
    with pytest.raises(ValueError, match="SegmentCache: memory must be an int of at least 0; got -1"):
        SegmentCache(4, -1)
    cache, x = SegmentCache(4, 2), torch.randn(1, 1, 9, 4)
    with pytest.raises(NotImplementedError, match="queries cannot choose among keys"):
        cache.attend(Linear(), x, x, x, mask=masks.Causal())
    assert (cache.length, cache.nbytes) == (0, 0)
    cache.attend(Softmax(), x, x, x)
    with pytest.raises(ValueError, match="positions must increase and come after those in the cache"):
        cache.attend(Softmax(), x, x, x, positions=range(9))
