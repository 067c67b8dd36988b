"""Forgetting attention as a layer: any split, crop, fork and file is the full run; packed texts are those alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from saccade import masks
from saccade.caches import CrossCache, KVCache, load_cache, padded_positions, save_cache
from saccade.nn import DecoderLayer, FeedForward, ForgettingAttention, QKNorm

TOTAL, WIDTH = 17, 32
CAUSAL = [None, masks.sliding_window(5), masks.Window(7, 3)]


def _layer(mask: masks.Mask | None = None, **kwargs: object) -> ForgettingAttention:
    torch.manual_seed(0)
    layer = ForgettingAttention(WIDTH, 4, mask=mask, **{"num_kv_heads": 2, **kwargs}).double().eval()  # type: ignore[arg-type]
    torch.nn.init.normal_(layer.forget_projection.bias)
    return layer


def _input(batch: int = 2, length: int = TOTAL) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def test_it_is_the_paper_s_formula() -> None:
    layer, x = _layer(), _input()
    q, k, v = (one(x) for one in (layer.query_projection, layer.key_projection, layer.value_projection))
    logs = F.logsigmoid(layer.forget_projection(x))
    heads = []
    for h in range(4):
        own, of_kv = slice(8 * h, 8 * h + 8), slice(8 * (h // 2), 8 * (h // 2) + 8)
        scores = q[..., own] @ k[..., of_kv].mT / 8**0.5
        for i in range(TOTAL):
            for j in range(i):
                scores[:, i, j] += logs[:, j + 1 : i + 1, h].sum(1)
        scores = scores.masked_fill(~torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril(), -torch.inf)
        torch.testing.assert_close(layer.matrix(x).to_dense()[:, h], scores.softmax(-1))
        heads.append(scores.softmax(-1) @ v[..., of_kv])
    torch.testing.assert_close(layer(x), layer.output_projection(torch.cat(heads, -1)))


def test_gradients_reach_every_parameter() -> None:
    layer, x = _layer(output_gate=True, qk_norm=QKNorm()), _input().requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,), fast_mode=True)
    layer(x).sin().sum().backward()
    assert all(own.grad is not None and own.grad.abs().max() > 0 for own in layer.parameters())


@pytest.mark.ci
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_split_of_a_ragged_batch_is_each_item_alone(data: st.DataObject) -> None:
    layer = _layer(data.draw(st.sampled_from(CAUSAL)), num_kv_heads=data.draw(st.sampled_from([1, 2, 4])))
    layer.requires_grad_(False)
    x = _input(3)
    full = torch.cat([layer(own[None]) for own in x])
    done = data.draw(st.lists(st.integers(1, 9), min_size=3, max_size=3))
    positions = padded_positions(done, side=data.draw(st.sampled_from(["left", "right"])))
    padded = torch.full((3, positions.shape[1], WIDTH), 7.0, dtype=x.dtype)
    for b, length in enumerate(done):
        padded[b, positions[b] >= 0] = x[b, :length]
    cache = data.draw(st.sampled_from([layer.new_cache, lambda: KVCache(TOTAL + 9)]))()
    out = layer(padded, positions=positions, cache=cache)
    for b, length in enumerate(done):
        torch.testing.assert_close(out[b, positions[b] >= 0], full[b, :length], atol=1e-10, rtol=1e-10)
    for size in data.draw(st.lists(st.integers(0, 4), max_size=6)):
        stop = [start + size for start in done]
        if max(stop) > TOTAL:
            break
        new = torch.stack([own[a:b] for own, a, b in zip(x, done, stop, strict=True)])
        expected = torch.stack([own[a:b] for own, a, b in zip(full, done, stop, strict=True)])
        torch.testing.assert_close(layer(new, cache=cache), expected, atol=1e-10, rtol=1e-10)
        done = stop


def test_a_cropped_a_forked_and_a_saved_cache_go_on_with_the_same_gates(tmp_path: Path) -> None:
    layer, x = _layer().requires_grad_(False), _input()
    full, cache = layer(x), layer.new_cache()
    layer(x[:, :9], cache=cache)
    layer(torch.randn_like(x[:, :3]), cache=cache)
    cache.crop(9)
    other = cache.fork()
    layer(torch.randn_like(x[:, :2]), cache=other)
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors")
    for one in (cache, loaded):
        torch.testing.assert_close(layer(x[:, 9:], cache=one), full[:, 9:])


def test_packed_texts_are_those_alone() -> None:
    layer = _layer(masks.sliding_window(6))
    texts = [_input(1, length)[0] for length in (5, 1, 9)]
    packed = sc.pack(texts)
    together = layer(packed.tokens, mask=packed.mask())
    for own, text in zip(packed.unpack(together), texts, strict=True):
        torch.testing.assert_close(own, layer(text[None])[0])


def test_it_runs_in_a_decoder_layer_and_is_recorded() -> None:
    layer = DecoderLayer(_layer(short_convolution=3), FeedForward(WIDTH, 8)).double().eval()
    x = _input()
    with sc.record(layer, keep="qk") as recording:
        layer(x)
    weights = recording["attention"].matrix.to_dense()
    torch.testing.assert_close(weights, layer.attention.matrix(layer.attention_norm(x)).to_dense())
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, TOTAL, dtype=torch.float64))
    cache = layer.new_cache()
    with torch.no_grad():
        parts = [layer(x[:, :9], cache=cache), *(layer(x[:, i : i + 1], cache=cache) for i in range(9, TOTAL))]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x))


def test_inputs_without_gates_are_refused() -> None:
    layer, x = _layer(), _input()
    with pytest.raises(ValueError, match="key must be None, because the forget gates"):
        layer(x, torch.randn_like(x))
    with pytest.raises(ValueError, match="key must be None, because the forget gates"):
        layer(x, cache=CrossCache())
    with pytest.raises(sc.UnsupportedError, match="it does not support nested tensors"):
        layer(torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged))
    with pytest.raises(sc.UnsupportedError, match="its decays are already the bias"):
        layer(x, bias=sc.positions.ALiBi(4))
