"""Latent attention: both forms are one definition, and any split is the full run."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.caches import (
    BlockSelectCache,
    CrossCache,
    HeavyHitterCache,
    Int8Cache,
    KVCache,
    LatentCache,
    SinkWindowCache,
    load_cache,
    padded_positions,
    save_cache,
)
from saccade.nn import DecoderLayer, FeedForward, LatentAttention
from saccade.positions import ALiBi, Rotary

TOTAL, WIDTH, HEADS = 23, 24, 4
SIZES = {"latent_dim": 10, "head_dim": 9, "rotary_dim": 4, "value_dim": 6}
FORMS = ("auto", "expanded", "absorbed")
CAUSAL = [
    masks.Causal(),
    masks.sliding_window(5),
    masks.streaming(2, 4),
    masks.Causal() & (masks.Window(3, 0) | masks.Global([0, 4])),
    masks.Documents([4, 9, 30], rule=masks.Causal()),
    masks.Causal() & ~masks.Window(2, 0),  # the first rows see nothing
]


def _layer(form: str = "auto", mask: masks.Mask | None = CAUSAL[0], **kwargs) -> LatentAttention:
    torch.manual_seed(0)
    given = {**SIZES, "query_latent_dim": 8, "rotary": Rotary(4, layout="interleaved"), **kwargs}
    layer = LatentAttention(WIDTH, HEADS, mask=mask, form=form, **given).double().eval()
    for norm in (layer.query_norm, layer.latent_norm):
        if norm is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    return layer


def _definition(layer: LatentAttention, x: Tensor, mask: masks.Mask) -> tuple[Tensor, Tensor]:
    """The paper's equations 9 to 19 head by head, the rotation as a product of complex numbers."""
    batch, length, _ = x.shape
    weights = {name: own.detach() for name, own in layer.named_parameters()}

    def normed(y: Tensor, weight: Tensor) -> Tensor:
        return y / ((y * y).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turned(y: Tensor) -> Tensor:
        angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
        pairs = torch.complex(y[..., 0::2], y[..., 1::2]) * torch.polar(torch.ones_like(angles), angles)
        return torch.stack([pairs.real, pairs.imag], -1).flatten(-2)

    of_query = normed(x @ weights["query_latent_projection.weight"].T, weights["query_norm.weight"])
    queries = (of_query @ weights["query_projection.weight"].T).view(batch, length, HEADS, 9)
    both = x @ weights["latent_projection.weight"].T
    latents, shared = normed(both[..., :10], weights["latent_norm.weight"]), turned(both[..., 10:])
    expansion, heads, maps = weights["expansion.weight"].view(HEADS, 11, 10), [], []
    allowed = mask.to_dense(length).reshape(length, length)
    for h in range(HEADS):
        q = torch.cat([queries[:, :, h, :5], turned(queries[:, :, h, 5:])], -1)
        k = torch.cat([latents @ expansion[h, :5].T, shared], -1)
        scores = (q @ k.mT / 3.0).masked_fill(~allowed, -torch.inf)
        map_ = torch.nan_to_num(scores.softmax(-1))
        maps.append(map_)
        heads.append(map_ @ (latents @ expansion[h, 5:].T))
    return torch.cat(heads, -1) @ weights["output_projection.weight"].T, torch.stack(maps, 1)


@pytest.mark.parametrize("mask", CAUSAL, ids=str)
def test_both_forms_are_the_definition(mask: masks.Mask) -> None:
    x = torch.randn(2, TOTAL, WIDTH, dtype=torch.float64)
    outs, maps = [], []
    for form in FORMS:
        layer = _layer(form, mask)
        outs.append(layer(x))
        maps.append(layer.matrix(x).to_dense())
    assert layer.matrix(x).kv_heads == 1
    assert _layer("expanded", mask).matrix(x).kv_heads == HEADS
    expected, weights = _definition(_layer(mask=mask), x, mask)
    for out, own in zip(outs, maps, strict=True):
        torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(own, weights, atol=1e-10, rtol=1e-10)


def test_gradients_of_both_forms_are_one_another_s() -> None:
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    grads = []
    for form in ("expanded", "absorbed"):
        layer = _layer(form)
        layer(x).sin().sum().backward()
        grads.append([own.grad for own in layer.parameters()])
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads[0])
    torch.testing.assert_close(*grads, atol=1e-10, rtol=1e-10)


@pytest.mark.ci
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_split_in_any_forms_is_the_full_run(data: st.DataObject) -> None:
    mask = data.draw(st.sampled_from(CAUSAL))
    kwargs = data.draw(st.sampled_from([{}, {"query_latent_dim": None}, {"rotary_dim": 0, "rotary": None}]))
    layers = {form: _layer(form, mask, **kwargs).requires_grad_(False) for form in FORMS}
    x = torch.randn(3, TOTAL, WIDTH, dtype=torch.float64)
    full = torch.cat([layers["auto"](own[None]) for own in x])
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=3, max_size=3))
    positions = padded_positions(lengths, side=data.draw(st.sampled_from(["left", "right"])))
    padded = torch.full((3, positions.shape[1], WIDTH), 7.0, dtype=x.dtype)
    for b, length in enumerate(lengths):
        padded[b, positions[b] >= 0] = x[b, :length]
    max_len, kind = data.draw(st.sampled_from([None, TOTAL])), data.draw(st.sampled_from([LatentCache, KVCache]))
    cache = LatentCache(10, max_len) if kind is LatentCache else KVCache(max_len)
    out = layers[data.draw(st.sampled_from(FORMS))](padded, positions=positions, cache=cache)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(out[b, positions[b] >= 0], full[b, :length], atol=1e-10, rtol=1e-10)
    done = lengths
    for size in data.draw(st.lists(st.integers(0, 4), max_size=6)):
        stop = [start + size for start in done]
        if max(stop) > TOTAL:
            break
        new = torch.stack([own[a:b] for own, a, b in zip(x, done, stop, strict=True)])
        out = layers[data.draw(st.sampled_from(FORMS))](new, cache=cache)
        expected = torch.stack([own[a:b] for own, a, b in zip(full, done, stop, strict=True)])
        torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
        done = stop


@pytest.mark.parametrize("form", FORMS)
def test_packed_texts_are_each_alone(form: str) -> None:
    layer = _layer(form)
    texts = [torch.randn(n, WIDTH, dtype=torch.float64) for n in (5, 1, 9)]
    packed = sc.pack(texts)
    out = layer(packed.tokens, mask=packed.mask())
    expected = torch.cat([layer(text[None])[0] for text in texts])
    torch.testing.assert_close(out[0], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_forks_crops_and_other_orders_go_on_as_if_nothing_had_been(form: str, tmp_path) -> None:
    layer, x = _layer(form).requires_grad_(False), torch.randn(3, TOTAL, WIDTH, dtype=torch.float64)
    full, cache = layer(x), layer.new_cache()
    layer(x[:, :6], cache=cache)
    guess = cache.fork()
    layer(torch.randn(3, 5, WIDTH, dtype=torch.float64), cache=guess)
    guess.crop(4)
    torch.testing.assert_close(layer(x[:, 4:9], cache=guess), full[:, 4:9])
    guess.reorder([2, 0])
    torch.testing.assert_close(layer(x[[2, 0], 9:10], cache=guess), full[[2, 0], 9:10])
    save_cache(cache, tmp_path / "cache")
    read = load_cache(tmp_path / "cache")
    assert repr(read.fork()) == repr(load_cache(tmp_path / "cache"))
    for one in (cache, read):
        torch.testing.assert_close(layer(x[:, 6:11], cache=one), full[:, 6:11])
    filled = layer.new_cache()
    assert cache.key is not None
    assert cache.value is not None
    filled.fill(cache.key, cache.value.clone())
    torch.testing.assert_close(layer(x[:, 11:], cache=filled), full[:, 11:])


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_gradients_with_a_cache_reach_whatever_wants_one(form: str) -> None:
    layer, x = _layer(form), torch.randn(1, 8, WIDTH, dtype=torch.float64)
    layer.requires_grad_(False)
    layer.expansion.weight.requires_grad_()  # nothing that the cache is handed wants a gradient
    cache = layer.new_cache(TOTAL)
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
    out = layer(x[:, 5:], cache=cache)
    layer(x, cache=cache)  # what is written now must not spoil the graph
    (grad,) = torch.autograd.grad(out.sin().sum(), layer.expansion.weight)
    (expected,) = torch.autograd.grad(layer(x)[:, 5:].sin().sum(), layer.expansion.weight)
    torch.testing.assert_close(grad, expected, atol=1e-10, rtol=1e-10)


def test_any_cache_of_keys_and_values_holds_latents_too() -> None:
    layer, x = _layer().requires_grad_(False), torch.randn(2, 12, WIDTH, dtype=torch.float64)
    full = layer(x)
    for cache in (SinkWindowCache(2, 20), BlockSelectCache(4, 32), HeavyHitterCache(40), Int8Cache(16), KVCache()):
        out = torch.cat([layer(x[:, :9], cache=cache), *(layer(x[:, i : i + 1], cache=cache) for i in range(9, 12))], 1)
        torch.testing.assert_close(out, full, atol=1e-10, rtol=1e-10)
    with pytest.raises(NotImplementedError, match="a SinkWindowCache does not return all latents; a LatentCache does"):
        _layer("expanded")(x, cache=SinkWindowCache(2, 20))
    with pytest.raises(ValueError, match="LatentAttention: cache must be a self-attention cache; got CrossCache"):
        layer(x, cache=CrossCache())


def test_a_token_takes_the_bytes_that_are_said() -> None:
    v3_sizes = {"latent_dim": 512, "head_dim": 192, "rotary_dim": 64, "value_dim": 128}
    with torch.device("meta"):
        layer = LatentAttention(64, 128, **v3_sizes)
    told = layer.explain(1, 4096, dtype=torch.bfloat16)
    assert told.startswith("1 on 4,096 tokens: absorbed")
    assert "cheaper from 171 queries on" in told
    assert "1,152 bytes in bfloat16" in told
    assert "would take 81,920 bytes, 71 times as many" in told
    assert layer.explain(256, 4096).startswith("256 on 4,096 tokens: expanded")
    assert layer.explain(5).startswith("5 on 5 tokens: expanded")  # a prompt
    small = LatentAttention(64, 8, **v3_sizes, mask=CAUSAL[0]).bfloat16()
    cache = small.new_cache(100)
    small(torch.randn(1, 40, 64, dtype=torch.bfloat16), cache=cache)
    assert cache.nbytes == 100 * 1152
    assert cache.traffic.bytes_appended == 40 * 1152
    small(torch.randn(1, 1, 64, dtype=torch.bfloat16), cache=cache)
    assert cache.traffic == (41 * 1152, 1152)


def test_the_form_is_the_cheaper_one() -> None:
    """Counted here operation by operation, for sizes on both sides of where 2 latent + turned = head + value."""
    for latent, head, turned, value in [(10, 9, 4, 6), (3, 9, 4, 6), (512, 192, 64, 128)]:
        layer = LatentAttention(8, 2, latent_dim=latent, head_dim=head, rotary_dim=turned, value_dim=value)
        for q_len, kv_len in itertools.product((1, 3, 170, 172), (172, 4096, 10**6)):
            made = kv_len * latent * (head - turned + value)
            expanded = made + q_len * kv_len * head + q_len * kv_len * value
            moved = q_len * latent * (head - turned) + q_len * latent * value
            absorbed = moved + q_len * kv_len * (latent + turned) + q_len * kv_len * latent
            expected = "absorbed" if absorbed < expanded else "expanded"
            assert layer.explain(q_len, kv_len).split()[4].rstrip(";") == expected


def test_it_stands_where_an_attention_stands() -> None:
    layer = DecoderLayer(_layer(), FeedForward(WIDTH, 8).double()).double().eval()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    cache = layer.new_cache()
    assert isinstance(cache, LatentCache)
    out = torch.cat([layer(x[:, :5], cache=cache), layer(x[:, 5:], cache=cache)], 1)
    torch.testing.assert_close(out, layer(x))
    assert layer.matrix(x).shape == (2, HEADS, 9, 9)
    for form in FORMS:
        layer.attention.form = form
        with torch.no_grad(), sc.record(layer, keep="qk") as recording:
            layer(x)
        assert list(recording) == ["attention"]
        torch.testing.assert_close(recording[0].matrix.to_dense(), layer.matrix(x).to_dense())


def test_terms_and_padding_of_a_call() -> None:
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    bias = ALiBi(HEADS)
    for form in FORMS:
        layer = _layer(form)
        cache = layer.new_cache()
        split = torch.cat([layer(x[:, :5], bias=bias, cache=cache), layer(x[:, 5:], bias=bias, cache=cache)], 1)
        torch.testing.assert_close(split, layer(x, bias=bias))
        assert not torch.allclose(split, layer(x))
        out = layer(x, mask=masks.Padding([9, 4]))
        torch.testing.assert_close(out[1, :4], layer(x[1:, :4])[0])
        assert torch.isfinite(out).all()


def test_an_expansion_that_is_no_plain_layer_is_run_and_never_read() -> None:
    layer, x = _layer(), torch.randn(1, 6, WIDTH, dtype=torch.float64)
    expected, plain = layer(x), copy.deepcopy(layer.expansion)
    layer.expansion = torch.nn.Sequential(plain)
    cache = layer.new_cache()
    out = torch.cat([layer(x[:, :5], cache=cache), layer(x[:, 5:], cache=cache)], 1)
    torch.testing.assert_close(out, expected)
    layer.form = "absorbed"
    with pytest.raises(NotImplementedError, match="its expansion is Sequential"):
        layer(x)
