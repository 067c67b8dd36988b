"""Selected blocks that the compiled kernel reads where they lie: the same as of a copy, which the oracle holds."""

import math

import pytest
import torch
from tests.engine.kernels.native_levels import needs_native

from saccade import masks
from saccade.caches import BlockSelectCache
from saccade.engine.kernels import native
from saccade.mechanisms import Softmax
from saccade.positions import ALiBi

has_half = pytest.mark.skipif(not native.reads(torch.bfloat16), reason="needs a processor that multiplies bfloat16")
DTYPES = [
    pytest.param(torch.float32, 1e-5, marks=needs_native),
    pytest.param(torch.bfloat16, 2e-2, marks=[needs_native, has_half]),
]
CAUSAL = masks.Causal()
MECHANISMS = {"plain": Softmax(), "softcap": Softmax(softcap=2.0, scale=0.3)}


def case(n, dtype, batch=2, heads=6, kv_heads=2):
    generator = torch.Generator().manual_seed(n)
    sizes = [(batch, kv_heads, n, 32), (batch, kv_heads, n, 48), (batch, heads, 1, 32)]
    return [torch.randn(*size, generator=generator).to(dtype) for size in sizes]


def step(key, value, query, mechanism, mask=CAUSAL, size=64, budget=384):
    cache = BlockSelectCache(size, budget)
    cache.fill(key[:, :, :-1], value[:, :, :-1])
    out = cache.attend(mechanism, query, key[:, :, -1:], value[:, :, -1:], mask=mask)
    return out, cache.traffic


def in_place(monkeypatch, is_wanted):
    """Switch it on or off, and hear how often it is taken."""
    monkeypatch.setattr("saccade.engine.kernels.native.is_on", lambda: True)
    calls = []
    way = BlockSelectCache._read_in_place
    monkeypatch.setattr(BlockSelectCache, "_read_in_place", lambda *args: calls.append(1) or way(*args))
    if not is_wanted:
        monkeypatch.setattr(BlockSelectCache, "_is_read_in_place", staticmethod(lambda call: False))
    return calls


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("n", [640, 641, 700, 703, 704])
@pytest.mark.parametrize("size", [64, 128])
def test_it_equals_the_product_with_a_copy(monkeypatch, dtype, tolerance, name, n, size):
    tensors = case(n, dtype)
    with monkeypatch.context() as patched:
        calls = in_place(patched, True)
        got, traffic = step(*tensors, MECHANISMS[name], size=size)
        assert calls
    with monkeypatch.context() as patched:
        calls = in_place(patched, False)
        expected, other = step(*tensors, MECHANISMS[name], size=size)
        assert not calls
    assert traffic == other
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
def test_unchosen_blocks_are_not_read(monkeypatch, dtype, tolerance):
    key, value, query = case(704, dtype)
    calls = in_place(monkeypatch, True)
    expected, _ = step(key, value, query, MECHANISMS["plain"], budget=192)
    value[:, :, 64:576] = math.nan  # with this budget the first block and the last ones are read
    got, _ = step(key, value, query, MECHANISMS["plain"], budget=192)
    assert len(calls) == 2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    value[:, :, -1] = math.nan
    assert step(key, value, query, MECHANISMS["plain"], budget=192)[0].isnan().all()


@needs_native
@pytest.mark.parametrize("why", ["a gradient", "another window", "a bias", "small blocks", "float64"])
def test_blocks_that_the_kernel_refuses_are_copied(monkeypatch, why):
    key, value, query = case(704, torch.float64 if why == "float64" else torch.float32)
    calls = in_place(monkeypatch, True)
    mechanism = Softmax(bias=ALiBi(6)) if why == "a bias" else MECHANISMS["plain"]
    mask = masks.sliding_window(300) if why == "another window" else CAUSAL
    query.requires_grad_(why == "a gradient")
    out, _ = step(key, value, query, mechanism, mask=mask, size=32 if why == "small blocks" else 64)
    assert not calls
    assert out.isfinite().all()
