"""Prefill and any split into further steps are the full run, with a state that does not grow."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.caches import Cache, KVCache, RecurrentCache, load_cache, padded_positions, save_cache
from saccade.masks import Causal, Documents, Mask, Padding
from saccade.mechanisms import CompressiveMemory, Delta, GatedLinear, Linear, Mechanism, Performer, Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import Rotary

TOTAL, WIDTH = 23, 16
MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "linear": Linear,
    "relu": lambda: Linear("squared_relu"),
    "random": lambda: Performer(8),
    "given": lambda: Performer(directions=torch.eye(4)),
    "sums alone": lambda: GatedLinear(scale=0.5),
    "delta": lambda: Delta(scale=0.3),
}
SUMS = ("linear", "relu")
CAUSAL: list[Mask] = [
    Causal(),
    Causal() & Padding([TOTAL, 9, 15]),
    Documents([4, 9, 30], rule=Causal()),
    Causal() & Documents([[1, 1, 12, 9], [23], [10, 3, 10]]),
    Causal() & Documents([4, 9, 10]),
]


def _layer(name: str, mask: Mask, kv_heads: int = 2, *, rotary: bool = False) -> MultiHeadAttention:
    torch.manual_seed(0)
    layer = MultiHeadAttention(
        WIDTH,
        4,
        num_kv_heads=kv_heads,
        mask=mask,
        mechanism=MECHANISMS[name](),
        rotary=Rotary(4) if rotary else None,
    )
    return layer.double().eval().requires_grad_(False)


def _x(batch: int = 3) -> Tensor:
    return torch.randn(batch, TOTAL, WIDTH, dtype=torch.float64)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_split_is_the_full_run_and_that_of_a_kv_cache(data: st.DataObject) -> None:
    mask = data.draw(st.sampled_from(CAUSAL))
    name = data.draw(st.sampled_from(sorted(MECHANISMS)))
    layer = _layer(name, mask, data.draw(st.sampled_from([1, 2, 4])), rotary=data.draw(st.booleans()))
    x = _x()
    full = layer(x)
    cache, other, start = layer.mechanism.new_cache(), KVCache(), 0
    assert isinstance(cache, RecurrentCache)
    for size in data.draw(st.lists(st.integers(0, 12), max_size=8)):
        stop = min(start + size, TOTAL)
        out = layer(x[:, start:stop], cache=cache)
        torch.testing.assert_close(out, full[:, start:stop])
        torch.testing.assert_close(out, layer(x[:, start:stop], cache=other))
        start = stop
        assert cache.length == stop
        assert cache.positions(2) == range(stop, stop + 2)


@pytest.mark.ci
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_split_of_a_ragged_batch_is_each_item_alone(data: st.DataObject) -> None:
    mask = data.draw(st.sampled_from([CAUSAL[0], CAUSAL[2], CAUSAL[4]]))
    layer = _layer(data.draw(st.sampled_from(sorted(MECHANISMS))), mask, rotary=data.draw(st.booleans()))
    x = _x()
    full = torch.cat([layer(own[None]) for own in x])
    prompts = data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any))
    positions = padded_positions(prompts, side=data.draw(st.sampled_from(["left", "right"])))
    padded = torch.full((3, positions.shape[1], WIDTH), 7.0, dtype=x.dtype)
    for b, length in enumerate(prompts):
        padded[b, positions[b] >= 0] = x[b, :length]
    cache = RecurrentCache()
    out = layer(padded, positions=positions, cache=cache)
    for b, length in enumerate(prompts):
        torch.testing.assert_close(out[b, positions[b] >= 0], full[b, :length])
    done = list(prompts)
    for size in data.draw(st.lists(st.integers(0, 4), max_size=5)):
        takes = data.draw(st.lists(st.integers(0, size), min_size=3, max_size=3))  # some items end earlier
        stop = [min(TOTAL, a + n) for a, n in zip(done, takes, strict=True)]
        table = torch.full((3, size), -1)
        new = torch.zeros(3, size, WIDTH, dtype=x.dtype)
        for b in range(3):
            count = stop[b] - done[b]
            table[b, :count], new[b, :count] = torch.arange(done[b], stop[b]), x[b, done[b] : stop[b]]
        out = layer(new, positions=table, cache=cache)
        for b in range(3):
            torch.testing.assert_close(out[b, : stop[b] - done[b]], full[b, done[b] : stop[b]])
        done = stop
        assert torch.as_tensor(cache.positions(1)).expand(3, 1).flatten().tolist() == done


@pytest.mark.parametrize("name", SUMS)
def test_memory_does_not_grow(name: str) -> None:
    layer, x = _layer(name, Causal()), _x()
    cache, sizes = RecurrentCache(), set()
    assert cache.nbytes == 0
    for start in range(0, 20, 5):
        layer(x[:, start : start + 5], cache=cache)
        sizes.add(cache.nbytes)
    features = cache._memory.state.shape[2]
    assert sizes == {3 * 2 * (features * 5 + 1) * 8 + 3 * 2}
    assert cache.traffic == (3 * 2 * features * 5 * 8,) * 2


@pytest.mark.parametrize("rows", [[2, 0, 0, 1], [1], [2, 1, 0]], ids=str)
@pytest.mark.parametrize("lengths", [[4, 6, 5], [6, 6, 6]], ids=str)
@pytest.mark.parametrize("name", MECHANISMS)
def test_saved_and_reordered_items_go_on_as_if_they_had_always_stood_there(
    name: str, rows: list[int], lengths: list[int], tmp_path: Path
) -> None:
    layer, x = _layer(name, Documents([5, 30], rule=Causal())), _x()
    full, cache = layer(x), RecurrentCache()
    layer(x[:, :6], positions=padded_positions(lengths), cache=cache)
    save_cache(cache, tmp_path / "cache")
    cache = load_cache(tmp_path / "cache")
    cache.reorder(rows)
    for step in range(2):
        at = [lengths[row] + step for row in rows]
        out = layer(torch.stack([x[row, i] for row, i in zip(rows, at, strict=True)])[:, None], cache=cache)
        torch.testing.assert_close(out[:, 0], torch.stack([full[row, i] for row, i in zip(rows, at, strict=True)]))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_fork_goes_its_own_way(name: str) -> None:
    layer, x = _layer(name, Causal()), _x()
    full, cache = layer(x), RecurrentCache()
    layer(x[:, :6], cache=cache)
    guess = cache.fork()
    layer(_x()[:, :4], cache=guess)
    torch.testing.assert_close(layer(x[:, 6:8], cache=cache), full[:, 6:8])
    assert (guess.length, cache.length) == (10, 8)


@pytest.mark.parametrize("name", MECHANISMS)
def test_it_goes_back_to_the_start_or_nowhere(name: str) -> None:
    layer, x = _layer(name, Causal()), _x()
    cache = RecurrentCache()
    layer(x[:, :6], cache=cache)
    cache.crop(6)
    with pytest.raises(sc.UnsupportedError, match="one sum over 6 tokens, from which the last ones cannot be removed"):
        cache.crop(5)
    assert cache.length == 6
    cache.crop(0)
    torch.testing.assert_close(layer(x[:, :6], cache=cache), layer(x)[:, :6])


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("where", ["key", "value"])
def test_a_nan_is_remembered_until_its_document_ends(name: str, where: str) -> None:
    mask = Documents([5, 4, 30], rule=Causal())
    q, k, v = (torch.randn(1, 4, 12, 4) for _ in range(3))
    mechanism = MECHANISMS[name]()
    clean = mechanism(q, k, mask=mask) @ v
    (k if where == "key" else v)[0, 1, 2] = math.nan
    cache = RecurrentCache()
    steps = [(0, 2), (2, 4), (4, 5), (5, 6), (6, 12)]
    out = torch.cat([cache.attend(mechanism, *(x[:, :, a:b] for x in (q, k, v)), mask=mask) for a, b in steps], 2)
    bad = torch.zeros(1, 4, 12, dtype=torch.bool)
    bad[0, 1, 2:5] = True
    assert out[bad].isnan().all()
    torch.testing.assert_close(out[~bad], clean[~bad])


def test_gradients_reach_the_tokens_of_the_call_only() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    cache, linear = RecurrentCache(), Linear()
    for a, b in ((0, 5), (5, 8)):
        out = cache.attend(linear, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], mask=Causal())
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for grad in grads:
        assert not grad[:, :, :5].any()
    assert grads[2][:, :, 5:].any()
    expected = torch.autograd.grad((linear(q, k, mask=Causal()) @ v)[:, :, 5:].sum(), v)[0]
    torch.testing.assert_close(grads[2][:, :, 5:], expected[:, :, 5:])


def test_unsupported_arguments_are_refused() -> None:
    q, k, v = (torch.randn(2, 2, 3, 4) for _ in range(3))
    cache, linear = RecurrentCache(), Linear()
    with pytest.raises(ValueError, match=r"RecurrentCache\.attend: mask must be causal"):
        cache.attend(linear, q, k, v)
    for other, name in ((Softmax(), "AttentionMatrix"), (CompressiveMemory(2, 2), "CompressiveMatrix")):
        with pytest.raises(sc.UnsupportedError, match=f"- {name} cannot be continued as a sum over keys"):
            cache.attend(other, q, k, v, mask=Causal())
    with pytest.raises(sc.UnsupportedError, match="individual weights of earlier tokens cannot be dropped from a sum"):
        cache.attend(linear, q, k, v, mask=Causal(), dropout_p=0.1)
    assert cache.length == 0
    cache.attend(linear, q, k, v, mask=Causal())
    with pytest.raises(
        ValueError, match=r"positions must increase and come after those " r"in the cache.*got range\(2, 5\)"
    ):
        cache.attend(linear, q, k, v, mask=Causal(), positions=range(2, 5))
    with pytest.raises(ValueError, match="positions must increase and come after those in the cache"):
        cache.attend(linear, q, k, v, mask=Causal(), positions=torch.tensor([[3, 4, 5], [3, 5, 4]]))
    with pytest.raises(ValueError, match="batch of key must be 2, as in the cache; got 1"):
        cache.attend(linear, q[:1], k[:1], v[:1], mask=Causal())
    with pytest.raises(ValueError, match="value_dim of value must be 4, as in the cache; got 3"):
        cache.attend(linear, q, k, v[..., :3], mask=Causal())
    with pytest.raises(TypeError, match="dtype of key must be float32, as in the cache; got float64"):
        cache.attend(linear, q.double(), k.double(), v.double(), mask=Causal())
    with pytest.raises(ValueError, match="mask must be the mask of earlier calls"):
        cache.attend(linear, q, k, v, mask=Documents([9], rule=Causal()))
    with pytest.raises(ValueError, match="features must be those of the memory; got other features"):
        cache.attend(Linear(lambda x: x[..., :2]), q, k, v, mask=Causal())
    assert cache.length == 3
    small = RecurrentCache(2)
    with pytest.raises(ValueError, match="tokens must fit in max_len 2; got 0 stored and 3 new"):
        small.attend(linear, q, k, v, mask=Causal())
    with pytest.raises(TypeError, match="RecurrentCache: max_len must be an int of at least 1; got True"):
        RecurrentCache(True)
    assert repr(small) == "RecurrentCache(max_len=2, length=0, nbytes=0)"


def test_sums_are_wide_so_that_narrower_floats_may_follow() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4).bfloat16() for _ in range(3))
    cache, linear = RecurrentCache(), Linear()
    cache.attend(linear, *(x[:, :, :5].float() for x in (q, k, v)), mask=Causal())
    out = cache.attend(linear, *(x[:, :, 5:] for x in (q, k, v)), mask=Causal())
    full = linear(q.float(), k.float(), mask=Causal()) @ v.float()
    torch.testing.assert_close(out.float(), full[:, :, 5:], atol=2e-2, rtol=2e-2)
    wide = RecurrentCache()
    wide.attend(linear, *(x.double() for x in (q, k, v)), mask=Causal())
    with pytest.raises(TypeError, match="dtype of key must be float64, as in the cache; got bfloat16"):
        wide.attend(linear, q, k, v, mask=Causal())


def test_a_call_of_no_tokens_binds_to_no_batch() -> None:
    cache, linear = RecurrentCache(), Linear()
    for batch, length in ((2, 0), (3, 0), (1, 4)):
        x = torch.randn(batch, 2, length, 4)
        assert cache.attend(linear, x, x, x, mask=Causal()).shape == x.shape
        assert cache.length == length
    with pytest.raises(ValueError, match="batch of key must be 1, as in the cache; got 2"):
        cache.attend(linear, *[torch.randn(2, 2, 1, 4)] * 3, mask=Causal())


def test_the_width_of_keys_is_the_mechanism_s() -> None:
    linear, cache = Linear(lambda x: x[..., :3].exp()), RecurrentCache()
    q, k, v = (torch.randn(2, 2, 6, width, dtype=torch.float64) for width in (5, 5, 4))
    out = [cache.attend(linear, q[:, :, :4], k[:, :, :4], v[:, :, :4], mask=Causal())]
    out += [cache.attend(linear, q[:, :, 4:, :3], k[:, :, 4:, :3], v[:, :, 4:], mask=Causal())]
    torch.testing.assert_close(torch.cat(out, 2), linear(q, k, mask=Causal()) @ v)


def test_it_is_the_cache_of_a_layer_in_a_model() -> None:
    cache = Cache([Linear().new_cache(), Linear().new_cache(7)])
    assert all(isinstance(layer, RecurrentCache) for layer in cache)
    assert cache.positions(2) == range(2)
    x = torch.ones(1, 1, 2, 2)
    with pytest.raises(ValueError, match="mask must be a rule on positions"):
        Linear().new_cache().attend(Linear(), x, x, x, mask=torch.ones(2, 2, dtype=torch.bool))


def test_it_refuses_masks_that_the_mechanism_refuses() -> None:
    x = torch.ones(1, 1, 2, 2)
    with pytest.raises(sc.UnsupportedError, match="Window is none of"):
        RecurrentCache().attend(Linear(), x, x, x, mask=masks.sliding_window(3))
