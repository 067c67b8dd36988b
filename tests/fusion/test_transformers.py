"""Eager attention of transformers' models is fused as it is."""

import pytest
import torch
from tests.integrations import model_zoo as zoo

from saccade.fusion import FuseAttention, ObserveAttention

CALLS = {"bart": 6, "t5": 6}  # others have two layers
NOT_FUSED = {"gpt_oss": 2}  # a column for the sink is joined to the scores


@pytest.mark.parametrize("name", zoo.ALL)
def test_models(name):
    model, inputs = zoo.model(name), zoo.batch(name, padded=0)
    calls, dense, observed = [], [], []
    results = []
    for mode in (None, FuseAttention(on_attention=calls.append, on_weights=dense.append)):
        model.zero_grad()
        if mode is None:
            out = zoo.output(name, model(**inputs, use_cache=False), padded=0)
        else:
            with mode:
                out = zoo.output(name, model(**inputs, use_cache=False), padded=0)
        (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        results.append((out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (expected, grads), (out, ours) = results
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for x, y in zip(ours, grads, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    with torch.no_grad(), ObserveAttention(observed.append):
        model(**inputs, use_cache=False)
    assert len(calls) == len(observed) == (0 if name in NOT_FUSED else CALLS.get(name, 2))


@pytest.mark.parametrize("name", [name for name in zoo.CAUSAL if name not in NOT_FUSED])
def test_generation_with_a_cache(name):
    model, ids = zoo.model(name), zoo.batch(name)["input_ids"]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    calls = []
    with FuseAttention(on_attention=calls.append):
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    heads, kv_heads = calls[-1].query.shape[1], calls[-1].key.shape[1]
    assert len(calls) == 10
    assert (heads, kv_heads) == (4, 4 if name == "gpt2" else 2)
    assert calls[-1].matrix().shape[:3] == (2, 4, 1)
