"""Prefill and any split into further steps are the full run; so is what is left after reorder, crop and fork."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade import masks
from saccade.caches import KVCache, padded_positions
from saccade.mechanisms import Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import T5, ALiBi, Rotary
from saccade.scores import Additive, Bilinear, Gaussian
from saccade.testing import oracle

TOTAL, HEADS, HEAD_DIM, PREFIX = 23, 4, 4, 3
WIDTH = HEADS * HEAD_DIM
CAUSAL = [
    masks.Causal(),
    masks.sliding_window(5),
    masks.streaming(2, 4),
    masks.Causal() & (masks.Window(3, 0) | masks.Global([0, 4])),
    masks.Causal() & (masks.Window(1, 0) | masks.Strided(4)),
    masks.sparse_transformer(3),
    masks.Causal() & (masks.Random(1, 3, seed=1) | masks.Window(2, 0)),
    masks.Causal() & masks.Blocks((torch.arange(64).reshape(8, 8) % 3 != 1).tolist(), 3),
    masks.Documents([4, 9, 30], rule=masks.Causal() & (masks.Window(3, 0) | masks.Global([0]))),
    masks.prefix_lm(PREFIX),
    masks.image_rows(PREFIX, 4, 5),
    masks.image_columns(PREFIX, 5, 4),
    masks.image_neighbors(PREFIX, 4, 5, (1, 2)),
    masks.Causal() & ~masks.Window(2, 0),  # the first rows see nothing
    masks.Predicate(lambda b, h, q, kv: (kv <= q) & ((q + kv + h) % 3 != 0)),
    masks.Causal() & masks.Dense(torch.arange(TOTAL**2).reshape(TOTAL, TOTAL) % 5 != 0),
]


def _t5() -> T5:
    bias = T5(HEADS, 8, 16, bidirectional=False)
    torch.nn.init.normal_(next(bias.parameters()))
    return bias


MECHANISMS: dict[str, Callable[[], Softmax]] = {
    "plain": Softmax,
    "alibi": lambda: Softmax(bias=ALiBi(HEADS)),
    "t5": lambda: Softmax(bias=_t5(), scale=1.0),
    "sink": lambda: Softmax(sink_logit=torch.randn(HEADS)),
    "softcap": lambda: Softmax(softcap=1.5, scale=2.0),
    "gaussian": lambda: Softmax(score=Gaussian()),
    "additive": lambda: Softmax(score=Additive(HEAD_DIM, HEAD_DIM, 6)),
    "bilinear": lambda: Softmax(score=Bilinear(HEAD_DIM, HEAD_DIM)),
}
SPLITS = st.lists(st.integers(0, 4), max_size=8)


class Run(NamedTuple):
    """A layer, its input, and what the layer makes of each batch item alone, in one go."""

    mha: MultiHeadAttention
    x: Tensor
    full: Tensor

    @classmethod
    def of(
        cls,
        mask: masks.Mask,
        name: str = "plain",
        kv_heads: int = 2,
        *,
        rotary: bool = True,
        batch: int = 3,
        dtype: torch.dtype = torch.float64,
    ) -> "Run":
        torch.manual_seed(0)
        mha = MultiHeadAttention(
            WIDTH,
            HEADS,
            num_kv_heads=kv_heads,
            mask=mask,
            mechanism=MECHANISMS[name](),
            rotary=Rotary(HEAD_DIM) if rotary else None,
        )
        mha = mha.to(dtype).eval().requires_grad_(False)
        x = torch.randn(batch, TOTAL, WIDTH, dtype=dtype)
        return cls(mha, x, torch.cat([mha(own[None]) for own in x]))


def _close(own: Tensor, full: Tensor) -> None:
    eps = 1e-10 if own.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(own, full, atol=eps, rtol=eps)


@pytest.mark.ci
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_split_is_the_full_run(data: st.DataObject) -> None:
    mask = data.draw(st.sampled_from(CAUSAL))
    run = Run.of(
        mask,
        data.draw(st.sampled_from(sorted(MECHANISMS))),
        data.draw(st.sampled_from([1, 2, 4])),
        rotary=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from([torch.float32, torch.float64])),
    )
    cache = KVCache(data.draw(st.sampled_from([None, TOTAL])))
    steps = [data.draw(st.integers(PREFIX, 12)), *data.draw(SPLITS)]
    out, start = [], 0
    for size in steps:
        stop = min(start + size, TOTAL)
        out.append(run.mha(run.x[:, start:stop], cache=cache))
        start = stop
        assert cache.length == stop
        assert cache.positions(2) == range(stop, stop + 2)
    _close(torch.cat(out, 1), run.full[:, :start])


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_split_of_a_ragged_batch_is_each_item_alone(data: st.DataObject) -> None:
    mask = data.draw(st.sampled_from(CAUSAL))
    run = Run.of(
        mask,
        data.draw(st.sampled_from(sorted(MECHANISMS))),
        data.draw(st.sampled_from([1, 2, 4])),
        rotary=data.draw(st.booleans()),
    )
    prompts = data.draw(st.lists(st.integers(PREFIX, 9), min_size=3, max_size=3))
    side = data.draw(st.sampled_from(["left", "right"]))
    positions = padded_positions(prompts, side=side)
    padded = torch.full((3, positions.shape[1], WIDTH), 7.0, dtype=run.x.dtype)
    cache = KVCache()
    for b, length in enumerate(prompts):
        padded[b, positions[b] >= 0] = run.x[b, :length]
    out = run.mha(padded, positions=positions, cache=cache)
    for b, length in enumerate(prompts):
        _close(out[b, positions[b] >= 0], run.full[b, :length])
    done = list(prompts)
    for size in data.draw(SPLITS):
        stop = [start + size for start in done]
        if max(stop) > TOTAL:
            break
        new = torch.stack([own[a:b] for own, a, b in zip(run.x, done, stop, strict=True)])
        out = run.mha(new, cache=cache)
        for b in range(3):
            _close(out[b], run.full[b, done[b] : stop[b]])
        done = stop


def test_items_that_have_ended_take_no_token() -> None:
    run = Run.of(masks.streaming(1, 4))
    cache = KVCache()
    run.mha(run.x[:, :6], cache=cache)
    positions = torch.tensor([[6, 7], [6, -1], [-1, -1]])
    out = run.mha(run.x[:, 6:8], positions=positions, cache=cache)
    _close(out[0], run.full[0, 6:8])
    _close(out[1, :1], run.full[1, 6:7])
    assert cache.positions(1).tolist() == [[8], [7], [6]]
    out = run.mha(torch.stack([run.x[0, 8], run.x[1, 7], run.x[2, 6]])[:, None], cache=cache)
    _close(out[:, 0], torch.stack([run.full[0, 8], run.full[1, 7], run.full[2, 6]]))


def test_tokens_may_begin_anywhere() -> None:
    run = Run.of(masks.Causal(), rotary=True)
    cache = KVCache()
    out = [run.mha(run.x[:, :5], positions=range(100, 105), cache=cache), run.mha(run.x[:, 5:7], cache=cache)]
    _close(torch.cat(out, 1), run.full[:, :7])  # rotations and causal masks know only distances
    assert cache.positions(1) == range(107, 108)
    assert cache.kv_positions == range(100, 107)


def test_the_cache_equals_the_definition() -> None:
    q = torch.randn(2, 4, 9, 4, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 9, 4, dtype=torch.float64) for _ in range(2))
    mask = masks.Causal() & (masks.Window(2, 0) | masks.Global([0]))
    expected, _ = oracle.attention(q, k, v, mask.to_dense(9, batch=2, heads=4))
    cache, softmax = KVCache(), Softmax()
    steps = [(0, 4), (4, 5), (5, 7), (7, 8), (8, 9)]
    out = [cache.attend(softmax, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], mask=mask) for a, b in steps]
    torch.testing.assert_close(torch.cat(out, 2), expected)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("max_len", [None, TOTAL])
@pytest.mark.parametrize("rows", [[2, 0, 0, 1], [1], [0, 1, 2], [2, 1, 0]], ids=str)
def test_reordered_items_go_on_as_if_they_had_always_stood_there(
    rows: list[int], max_len: int | None, ragged: bool
) -> None:
    run = Run.of(masks.streaming(1, 4))
    cache = KVCache(max_len)
    lengths = [4, 6, 5] if ragged else [6, 6, 6]
    positions = padded_positions(lengths)
    run.mha(run.x[:, :6], positions=positions, cache=cache)
    cache.reorder(rows)
    for _ in range(2):
        new = torch.stack([run.x[row, lengths[row]] for row in rows])[:, None]
        out = run.mha(new, cache=cache)
        _close(out[:, 0], torch.stack([run.full[row, lengths[row]] for row in rows]))
        lengths = [length + 1 for length in lengths]
    assert cache.key is not None
    assert cache.key.shape[0] == len(rows)


@pytest.mark.parametrize("length", [0, 1, 5, 8])
def test_a_cropped_cache_goes_on_where_it_was_cut(length: int) -> None:
    run = Run.of(masks.sliding_window(4))
    cache = KVCache()
    run.mha(run.x[:, :5], cache=cache)
    run.mha(run.x[:, 10:13], cache=cache)  # a guess that is taken back
    cache.crop(min(length, 5))
    out = run.mha(run.x[:, min(length, 5) : 9], cache=cache)
    _close(out, run.full[:, min(length, 5) : 9])


def test_a_cropped_ragged_cache_goes_on_where_each_item_was_cut() -> None:
    run = Run.of(masks.Causal())
    cache = KVCache()
    run.mha(run.x[:, :6], positions=padded_positions([4, 6, 5]), cache=cache)
    run.mha(torch.randn(3, 4, WIDTH, dtype=torch.float64), cache=cache)
    cache.crop(6)
    assert cache.positions(1).tolist() == [[4], [6], [5]]
    out = run.mha(torch.stack([run.x[0, 4], run.x[1, 6], run.x[2, 5]])[:, None], cache=cache)
    _close(out[:, 0], torch.stack([run.full[0, 4], run.full[1, 6], run.full[2, 5]]))
    cache.crop(0)
    _close(run.mha(run.x[:, :3], cache=cache), run.full[:, :3])


@pytest.mark.parametrize("max_len", [None, TOTAL])
def test_forks_do_not_show_in_one_another(max_len: int | None) -> None:
    run = Run.of(masks.Causal())
    cache = KVCache(max_len)
    run.mha(run.x[:, :6], cache=cache)
    other = cache.fork()
    third, cut = other.fork(), cache.fork()
    cache.crop(2)  # what is written now lies where the others still look
    run.mha(run.x[:, 9:13], cache=cache)
    _close(run.mha(run.x[:, 6:7], cache=cut), run.full[:, 6:7])
    noise = torch.randn(3, 3, WIDTH, dtype=torch.float64)
    run.mha(noise, cache=cache)
    _close(run.mha(run.x[:, 6:8], cache=other), run.full[:, 6:8])
    run.mha(noise, cache=cache)
    other.crop(3)
    run.mha(noise, cache=other)
    _close(run.mha(run.x[:, 6:9], cache=third), run.full[:, 6:9])
    assert (cache.length, other.length, third.length) == (12, 6, 9)
