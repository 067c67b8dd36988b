"""A captured matrix is the one that the layer multiplied by, and the layer's output is bitwise unchanged."""

import math

import pytest
import torch
from tests.integrations import model_zoo as zoo
from tests.integrations.captured_call import close, heard
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import saccade as sc
from saccade import caches, masks
from saccade.integrations.capture_all import capture_all


@pytest.mark.parametrize("name", zoo.ALL)
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saccade"])
def test_models_of_transformers(name, implementation):
    sc.integrations.transformers.install()
    if implementation == "sdpa" and name in ("gemma2", "gpt_oss"):
        implementation = "eager"  # all that transformers has for them
    inputs, eager = zoo.batch(name), zoo.model(name)
    with torch.no_grad():
        result = eager(**inputs, output_attentions=True)
    if name in zoo.PAIRED:
        both = zip(result.decoder_attentions, result.cross_attentions, strict=True)
        expected = [*result.encoder_attentions, *(weights for pair in both for weights in pair)]
    else:
        expected = result.attentions
    network = zoo.model(name, implementation)
    found = []
    with torch.no_grad():
        plain = zoo.output(name, network(**inputs))
        with capture_all(network, lambda name, make: found.append((name, make()))):
            out = zoo.output(name, network(**inputs))
    assert torch.equal(out, plain)
    assert len(found) == len(expected)
    for (_, matrix), weights in zip(found, expected, strict=True):
        real = weights.shape[2] - (8 if name in zoo.CAUSAL else weights.shape[2])
        dense = matrix.to_dense()
        close(dense[0, :, real:], weights[0, :, real:])
        close(dense[1], weights[1])
    assert "Dense" not in str([matrix.mask for _, matrix in found])
    names = [name for name, _ in found]
    assert len(set(names)) == len(names)
    assert all(isinstance(network.get_submodule(name), nn.Module) for name in names)


def test_a_mask_of_the_same_size_is_not_taken_for_another():
    network, inputs, found = zoo.model("llama", "sdpa"), zoo.batch("llama"), []
    own = (torch.rand(2, 1, 11, 11) < 0.5) | torch.eye(11, dtype=torch.bool)
    with torch.no_grad(), capture_all(network, lambda name, make: found.append(make().to_dense())):
        network(**inputs)
        network(inputs["input_ids"], attention_mask=own)
        copied = own.clone()
        network(inputs["input_ids"], attention_mask=copied)
    assert torch.equal(found[2] > 0, own.expand(2, 4, 11, 11))
    assert torch.equal(found[4], found[2])


@pytest.mark.parametrize("small", [1 << 20, 30])  # few rows at a time
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saccade"])
def test_a_mask_that_is_written_into_says_what_was_written(implementation, guard, small, monkeypatch):
    monkeypatch.setattr("saccade.integrations.transformers_capture._SMALL", small)
    sc.integrations.transformers.install()
    network, inputs, found = zoo.model("llama", implementation), zoo.batch("llama"), []
    embeddings = torch.zeros(2, 11, 32)
    with guard(), capture_all(network, lambda name, make: found.append(make())):
        mask = masking_utils.create_causal_mask(network.config, embeddings, inputs["attention_mask"], None)
        network(inputs["input_ids"], attention_mask=mask)
        mask[..., 5] = mask[0, 0, 0, 10]  # what hides a key, in whichever way
        network(inputs["input_ids"], attention_mask=mask)
        before, after = found[0].to_dense(), found[2].to_dense()
    assert "Dense" not in str(found[0].mask)
    assert (before[1, :, 5:, 5] > 0).all()
    assert (after[..., 5] == 0).all()
    assert ((after > 0) == (before > 0))[..., [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]].all()


def test_the_ear_is_taken_out_again():
    before = (AttentionInterface.get_interface, AttentionMaskInterface.__getitem__)
    network, other, names = zoo.model("llama"), zoo.model("llama"), []
    with capture_all(network, lambda name, make: names.append(name)):
        with capture_all(network, lambda name, make: names.append(f"inner {name}")):
            network(**zoo.batch("llama"))
        other(**zoo.batch("llama"))
        assert AttentionInterface.get_interface is not before[0]
    assert names[:2] == ["model.layers.0.self_attn", "inner model.layers.0.self_attn"]
    assert len(names) == 4
    network(**zoo.batch("llama"))
    assert len(names) == 4
    assert (AttentionInterface.get_interface, AttentionMaskInterface.__getitem__) == before
    assert "forward" not in vars(network)


class Around(nn.Module):
    """A user's model around one of transformers."""

    def __init__(self):
        super().__init__()
        self.inner = zoo.model("llama", "sdpa")

    def forward(self, **inputs):
        return self.inner(**inputs).logits


def test_the_product_inside_an_attention_function_is_no_layer_of_its_own():
    _, found = heard(Around(), **zoo.batch("llama"))
    assert [name for name, _ in found] == ["inner.model.layers.0.self_attn", "inner.model.layers.1.self_attn"]


def test_a_checkpointed_layer_is_handed_out_once():
    network = zoo.model("llama").train()
    network.gradient_checkpointing_enable()
    ids, names = zoo.batch("llama")["input_ids"], []
    with capture_all(network, lambda name, make: names.append(name)):
        network(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(names) == 2


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast):
    network = zoo.model("gpt_oss") if autocast else zoo.model("gpt_oss").bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, found = heard(network, **zoo.batch("gpt_oss"), use_cache=False, return_dict=False)
    assert all(weights.dtype == torch.float32 for _, weights in found)


def test_gradients_stay_as_they_are():
    ids, grads = zoo.batch("llama")["input_ids"], []
    for recorded in (False, True):
        network = zoo.model("llama", "sdpa")
        with capture_all(network, lambda name, make: make().entropy() if recorded else None):  # noqa: B023
            network(input_ids=ids, labels=ids).loss.backward()
        grads.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_our_own_layers():
    shared = sc.mechanisms.Softmax()
    block = nn.Sequential(*(sc.nn.MultiHeadAttention(16, 4, mask=masks.Causal(), mechanism=shared) for _ in range(2)))
    x = torch.randn(2, 7, 16)
    _, found = heard(block, x)
    assert [name for name, _ in found] == ["0", "1"]
    close(found[0][1], block[0].matrix(x).to_dense())
    close(found[1][1], block[1].matrix(block[0](x)).to_dense())


def test_a_cache_that_holds_a_sum_is_refused():
    layer = sc.nn.MultiHeadAttention(16, 4, mechanism=sc.mechanisms.Linear(), mask=masks.Causal())
    cache, x = caches.RecurrentCache(), torch.randn(1, 7, 16)
    with capture_all(layer, lambda name, make: make()):
        layer(x, cache=cache)
        with pytest.raises(sc.UnsupportedError, match=r"MultiHeadAttention cannot run(.|\n)*stores a sum"):
            layer(x, cache=cache)
    layer(x, cache=cache)


@pytest.mark.parametrize(
    "cache", [caches.SinkWindowCache(1, 3), caches.BlockSelectCache(2, 6), caches.HeavyHitterCache(8)]
)
def test_a_cache_that_hands_on_some_keys_is_refused(cache):
    layer = sc.nn.MultiHeadAttention(16, 4, mask=masks.Causal())
    x = torch.randn(1, 9, 16)
    refused = pytest.raises(sc.UnsupportedError, match=r"MultiHeadAttention cannot run(.|\n)*some of the keys")
    with capture_all(layer, lambda name, make: make()), refused:
        layer(x, cache=cache)
    layer(x, cache=cache)


def definition_of_flash(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **facts):
    """Compute flash attention as documented: aligned at the end, without the keys of padding."""
    del facts
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    q_len, kv_len = query.shape[2], key.shape[2]
    q, kv = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
    allowed = (kv <= q) if module.is_causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    if sliding_window is not None:
        allowed = allowed & (kv > q - sliding_window)
    allowed = allowed if attention_mask is None else allowed & attention_mask[:, None, None, :].bool()
    scores = (query @ key.mT * scaling).masked_fill(~allowed, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2), None


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_flash_attention(name, padded, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", definition_of_flash)
    inputs = zoo.batch(name, padded=padded)
    with torch.no_grad():
        expected = zoo.model(name)(**inputs, output_attentions=True).attentions
        network, found = zoo.model(name), []
        network.config._attn_implementation_internal = "flash_attention_2"
        with capture_all(network, lambda name, make: found.append(make())):
            network(**inputs)
    for matrix, weights in zip(found, expected, strict=True):
        close(matrix.to_dense()[0, :, padded:], weights[0, :, padded:])
        close(matrix.to_dense()[1], weights[1])


def test_packed_documents_under_flash_attention_are_refused(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", definition_of_flash)
    network = zoo.model("llama")
    network.config._attn_implementation_internal = "flash_attention_2"
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    with (
        capture_all(network, lambda name, make: make()),
        pytest.raises(sc.UnsupportedError, match=r'packed documents(.|\n)*set_attn_implementation\("sdpa"\)'),
    ):
        network(input_ids=zoo.batch("llama")["input_ids"][:1], position_ids=places, use_cache=False)


@pytest.mark.parametrize("known", [True, False])
def test_block_masks(known, monkeypatch):
    def product(module, query, key, value, attention_mask, scaling=None, **facts):
        assert isinstance(attention_mask, BlockMask)
        del facts
        return torch.zeros_like(query).transpose(1, 2), None

    def compiled_nothing(*, mask_mod, B, H, Q_LEN, KV_LEN, device, _compile):
        del _compile
        return create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=device)

    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", product)
    monkeypatch.setattr(masking_utils, "create_block_mask", compiled_nothing)
    network, inputs, found = zoo.model("mistral"), zoo.batch("mistral"), []
    network.config._attn_implementation_internal = "flex_attention"
    if not known:
        monkeypatch.setattr("saccade.integrations.transformers_capture._capturing_mask", lambda function: function)
    with torch.no_grad(), capture_all(network, lambda name, make: found.append(make())):
        network(**inputs)
    assert ("Predicate" in str(found[0].mask)) != known
    dense = masks.sliding_window(4).to_dense(11) & inputs["attention_mask"][:, None, None, :].bool()
    assert torch.equal(found[0].to_dense() > 0, dense.expand(2, 4, 11, 11))
