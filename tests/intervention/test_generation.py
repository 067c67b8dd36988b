"""intervene on models of transformers equals hand-written hooks, also in steps with a cache and under a recording."""

import pytest
import torch
from tests.integrations.replaceable_models import gpt2
from tests.sampled import sampled
from transformers import LlamaConfig, LlamaForCausalLM

import saccade as sc
from saccade import masks
from saccade.matrix import DenseMatrix


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


MODELS = {
    "gpt2": (gpt2, "transformer.h.1.attn", "c_proj", 2),
    "llama": (llama, "model.layers.1.self_attn", "o_proj", 4),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saccade"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_equal_hooks(name, implementation):
    build, layer, projection, count = MODELS[name]
    model, ids = build(), torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    if implementation == "saccade":
        sc.integrations.transformers.install()
    model.set_attn_implementation(implementation)

    def hook(module, args):
        out = args[0].unflatten(-1, (count, -1)).clone()
        out[..., 1, :] = 0
        return (out.flatten(2),)

    handle = getattr(model.get_submodule(layer), projection).register_forward_pre_hook(hook)
    expected = model(ids).logits
    texts = model.generate(ids, max_new_tokens=5, do_sample=False)
    handle.remove()
    with sc.intervene(model) as edit:
        edit.ablate(layer, 1)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-6, rtol=1e-6)
        edit.mask(layer, 0, masks.Window(2, 0))
        with sc.record(model, keep="qk") as recording:
            model(ids)
        rows = recording[layer].matrix.to_dense()
        assert not rows[:, 0].tril(-3).any()
        assert rows[:, 1].tril(-3).any()
    with sc.intervene(model) as edit:
        edit.ablate(layer, 1)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), texts)
    assert not torch.allclose(model(ids).logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_edges_are_cut_in_generation_with_a_cache(name):
    build, _, _, _ = MODELS[name]
    model, ids = build(), torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    with sc.intervene(model) as edit:
        edit.mask("*", None, masks.Window(3, 0))
        whole = model(ids).logits
        first = model(ids[:, :6], use_cache=True)
        rest = [model(ids[:, place : place + 1], past_key_values=first.past_key_values).logits for place in range(6, 9)]
    torch.testing.assert_close(torch.cat([first.logits, *rest], 1), whole, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(ids).logits, whole, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_frozen_patterns_in_steps_with_a_cache(name):
    build, _, _, _ = MODELS[name]
    model, ids = build(), torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    other = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    with sc.record(model, keep="qk") as recording:
        model(other)
    with sc.intervene(model) as edit:
        edit.freeze(recording)
        whole = model(ids).logits
        first = model(ids[:, :6], use_cache=True)
        rest = [model(ids[:, place : place + 1], past_key_values=first.past_key_values).logits for place in range(6, 9)]
    torch.testing.assert_close(torch.cat([first.logits, *rest], 1), whole, atol=1e-5, rtol=1e-5)


GENERATED = {
    "ablated": lambda edit, layer, heads: edit.ablate(layer, 1),
    "cut": lambda edit, layer, heads: edit.mask(layer, 1, masks.Window(3, 0)),
    "patched": lambda edit, layer, heads: edit.pattern(
        layer, 1, DenseMatrix(masks.Causal().to_dense(13) / torch.arange(1.0, 14)[:, None].expand(1, heads, 13, 1))
    ),
}


@pytest.mark.parametrize(
    "name, kind, cache",
    sampled(
        [pytest.param(name, kind, cache) for kind in GENERATED for name in MODELS for cache in (None, "static")], 5
    ),
)
def test_an_edited_generation_is_recorded_as_one_run(name, kind, cache):
    build, layer, _, heads = MODELS[name]
    model, ids = build(), torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    torch.manual_seed(4)
    with sc.intervene(model) as edit:
        GENERATED[kind](edit, layer, heads)
        with sc.record(model, keep=("qk", "statistics")) as recording, sc.record(model, heads=[1], keep="qk") as head:
            texts = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, cache_implementation=cache)
        assert len(forwards) == 5
        with sc.record(model, keep=("qk", "statistics")) as whole:
            model(texts[:, :-1])
    for each in recording:
        assert len(recording.runs(each)) == len(head.runs(each)) == 1
        expected = whole[each].matrix.to_dense()
        torch.testing.assert_close(recording[each].matrix.to_dense()[..., :13], expected)
        torch.testing.assert_close(head[each].matrix.to_dense()[..., :13], expected[:, 1:2])
        torch.testing.assert_close(recording[each].statistics["entropy"], whole[each].statistics["entropy"])
