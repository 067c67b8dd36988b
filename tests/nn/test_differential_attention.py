"""Differential attention: the paper's formula head by head, transformers' layer, and any split is the full run."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

import saccade as sc
from saccade import masks
from saccade.caches import Int8Cache, KVCache, SinkWindowCache, padded_positions
from saccade.integrations.transformers import from_transformers
from saccade.mechanisms import Differential
from saccade.nn import DecoderLayer, DifferentialAttention, FeedForward, to_torch
from saccade.positions import ALiBi, Rotary

TOTAL, WIDTH = 17, 32
CAUSAL = [masks.Causal(), masks.sliding_window(5), masks.streaming(2, 4), masks.Causal() & ~masks.Window(2, 0)]


def _layer(mask: masks.Mask | None = CAUSAL[0], **kwargs) -> DifferentialAttention:
    torch.manual_seed(0)
    given = {"num_kv_heads": 2, "layer": 3, "rotary": Rotary(4), **kwargs}
    layer = DifferentialAttention(WIDTH, 4, mask=mask, **given).double().eval()
    with torch.no_grad():
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            getattr(layer.mechanism, name).normal_()
    return layer


def _definition(layer: DifferentialAttention, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Equations 1 to 3 of the paper; without rotary."""
    own = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    lam = {name: own[f"mechanism.lambda_{name}"] for name in ("q1", "k1", "q2", "k2")}
    start = 0.8 - 0.6 * math.exp(-0.3 * 3)
    weight = math.exp(float(lam["q1"] @ lam["k1"])) - math.exp(float(lam["q2"] @ lam["k2"])) + start
    q, k, v = (x @ own[f"{name}_projection.weight"].T for name in ("query", "key", "value"))
    heads, maps = [], []
    for h in range(4):
        of_q, of_kv = slice(8 * h, 8 * h + 8), slice(8 * (h // 2), 8 * (h // 2) + 8)
        both = []
        for part in (slice(0, 4), slice(4, 8)):
            scores = q[..., of_q][..., part] @ k[..., of_kv][..., part].mT / 2
            both.append(torch.nan_to_num(scores.masked_fill(~mask, -torch.inf).softmax(-1)))
        maps.append(both[0] - weight * both[1])
        head = maps[-1] @ v[..., of_kv]
        heads.append((1 - start) * head / (head.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())
    return torch.cat(heads, -1) @ own["output_projection.weight"].T, torch.stack(maps, 1)


@pytest.mark.parametrize("mask", CAUSAL, ids=str)
def test_it_is_the_paper_s_formula(mask: masks.Mask) -> None:
    layer, x = _layer(mask, rotary=None), torch.randn(2, TOTAL, WIDTH, dtype=torch.float64)
    expected, weights = _definition(layer, x, mask.to_dense(TOTAL).reshape(TOTAL, TOTAL))
    torch.testing.assert_close(layer(x), expected, atol=1e-10, rtol=1e-10)
    A = layer.matrix(x)
    assert not A.is_stochastic
    assert len(A.terms) == 2
    torch.testing.assert_close(A.to_dense(), weights, atol=1e-10, rtol=1e-10)
    out, same = layer.with_weights(x)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(same, weights, atol=1e-10, rtol=1e-10)


def test_gradients_reach_every_parameter() -> None:
    layer, x = _layer(rotary=None), torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.mechanism.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        given = {f"mechanism.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(layer, given, x)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)
    layer(x).sin().sum().backward()
    assert all(own.grad is not None and own.grad.abs().max() > 0 for own in layer.parameters())


@pytest.mark.ci
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_split_of_a_ragged_batch_is_each_item_alone(data: st.DataObject) -> None:
    layer = _layer(data.draw(st.sampled_from(CAUSAL)), output_gate=data.draw(st.booleans())).requires_grad_(False)
    x = torch.randn(3, TOTAL, WIDTH, dtype=torch.float64)
    full = torch.cat([layer(own[None]) for own in x])
    done = data.draw(st.lists(st.integers(1, 9), min_size=3, max_size=3))
    positions = padded_positions(done, side=data.draw(st.sampled_from(["left", "right"])))
    padded = torch.full((3, positions.shape[1], WIDTH), 7.0, dtype=x.dtype)
    for b, length in enumerate(done):
        padded[b, positions[b] >= 0] = x[b, :length]
    cache = data.draw(
        st.sampled_from(
            [layer.new_cache, lambda: KVCache(TOTAL), lambda: Int8Cache(64), lambda: SinkWindowCache(2, 40)]
        )
    )()
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


def test_dropout_drops_from_the_difference() -> None:
    query, key = torch.randn(1, 2, 6, 8, dtype=torch.float64), torch.randn(1, 2, 6, 8, dtype=torch.float64)
    A = Differential(4).double()(query, key)
    kept = A.matmul(torch.eye(6, dtype=torch.float64).expand(1, 2, 6, 6), dropout_p=0.4, seed=3)
    dense = A.to_dense()
    stays = kept != 0
    assert 0 < stays.sum() < stays.numel()
    torch.testing.assert_close(kept[stays], dense[stays] / 0.6)


def test_a_bias_goes_to_both_maps_and_packed_texts_are_alone() -> None:
    layer, x = _layer(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    bias = ALiBi(4)
    cache = layer.new_cache()
    split = torch.cat([layer(x[:, :5], bias=bias, cache=cache), layer(x[:, 5:], bias=bias, cache=cache)], 1)
    torch.testing.assert_close(split, layer(x, bias=bias))
    dense = bias.to_dense(9).reshape(1, 4, 9, 9).double().expand(2, 4, 9, 9).contiguous()
    torch.testing.assert_close(split, layer(x, bias=dense))
    with pytest.raises(NotImplementedError, match="it has a bias already"):
        layer.mechanism.with_bias(bias).with_bias(bias)
    packed = sc.pack([x[0, :4], x[1]])
    out = packed.unpack(layer(packed.tokens, mask=packed.mask()))
    torch.testing.assert_close(out[0], layer(x[:1, :4])[0])
    torch.testing.assert_close(out[1], layer(x[1:])[0])


def test_it_stands_where_an_attention_stands() -> None:
    layer = DecoderLayer(_layer(), FeedForward(WIDTH, 8).double()).double().eval()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    cache = layer.new_cache()
    out = torch.cat([layer(x[:, :5], cache=cache), layer(x[:, 5:], cache=cache)], 1)
    torch.testing.assert_close(out, layer(x))
    with torch.no_grad(), sc.record(layer, keep=(sc.statistics.TopK(9),)) as recording:
        layer(x)
    assert list(recording) == ["attention"]
    with pytest.raises(
        NotImplementedError, match="its mechanism is Differential; torch's module has plain softmax only"
    ):
        to_torch(layer.attention)


@pytest.mark.parametrize("index", [0, 5])
@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_transformers_computes_the_same(kv_heads: int, index: int) -> None:
    torch.manual_seed(0)
    config = DiffLlamaConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=kv_heads, rope_theta=500.0, rms_norm_eps=1e-6
    )
    config._attn_implementation = "eager"
    theirs = DiffLlamaAttention(config, index).eval()
    with torch.no_grad():
        for own in theirs.parameters():
            own.copy_(torch.randn_like(own) * 0.3)
    ours = from_transformers(theirs)
    x = torch.randn(2, 11, 64)
    hidden = torch.zeros(1, 1, 11, 11).masked_fill(~masks.Causal().to_dense(11), torch.finfo(torch.float32).min)
    angles = DiffLlamaRotaryEmbedding(config)(x, torch.arange(11)[None])
    expected, weights = theirs(x, position_embeddings=angles, attention_mask=hidden)
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
    first, second = weights.chunk(2, 1)
    difference = first - ours.mechanism.weight.detach() * second
    torch.testing.assert_close(ours.matrix(x).to_dense(), difference, atol=1e-5, rtol=1e-5)
