"""Tests of torch's public operation as a kernel: inputs that it takes and refuses, and graph capture."""

import pytest
import torch
from torch.nn import functional as F

import saccade as sc
from saccade import masks, scores
from saccade.support.torch_modes import is_transformed


@pytest.fixture(autouse=True)
def _not_looked_at(monkeypatch):
    monkeypatch.setenv("SACCADE_FIRST_USE", "off")


def inputs(q_len=40, kv_len=40, dtype=torch.float32):
    query, key = (torch.randn(2, heads, n, 16, dtype=dtype) for heads, n in ((4, q_len), (2, kv_len)))
    return query, key, torch.randn(2, 2, kv_len, 24, dtype=dtype)


@pytest.mark.parametrize(
    ("mask", "q_len", "is_causal"),
    [
        (None, 40, False),
        (None, 7, False),
        (masks.Causal(), 40, True),
        (masks.Causal(), 1, False),
        (masks.Causal() & masks.Window(39, None), 40, True),
        (masks.Window(None, None), 7, False),
        (masks.Documents([40], rule=masks.Causal()), 40, True),
    ],
    ids=str,
)
def test_it_is_one_call(monkeypatch, mask, q_len, is_causal):
    asked = []

    def listened(*tensors, **options):
        asked.append(options)
        return original(*tensors, **options)

    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", listened)
    query, key, value = inputs(q_len)
    out = sc.attention(query, key, value, mask, impl="sdpa")
    assert asked == [{"is_causal": is_causal, "scale": 0.25, "enable_gqa": True}]
    torch.testing.assert_close(out, sc.attention(query, key, value, mask, impl="reference"))


def test_refused_inputs():
    query, key, value = inputs(30)
    refused = {
        "it supports full masks": {"mask": masks.Causal()},
        "and causal masks with as many queries": {"mask": masks.Window(3, 3)},
        "it needs a scale above 0": {"scale": 0.0},
        "its dropout is not a function of positions": {"dropout_p": 0.5},
        "it has no softcap": {"softcap": 3.0},
        "it would need a dense bias": {"bias": torch.zeros(1, 1, 1, 40)},
        "it supports only dot products": {"score": scores.Additive(16, 16, 4)},
        "it does not call functions of scores": {"score": lambda score, b, h, q, kv: score},
        "it does not return the lse, which is needed here": {"sink_logit": torch.zeros(4)},
    }
    for reason, options in refused.items():
        with pytest.raises(sc.UnsupportedError, match=reason):
            sc.attention(query, key, value, impl="sdpa", **options)
    with pytest.raises(sc.UnsupportedError, match="it does not accept empty inputs"):
        sc.attention(query[:, :, :0], key, value, impl="sdpa")
    with pytest.raises(sc.UnsupportedError, match="it does not return the lse"):
        sc.attention_with_lse(query, key, value, impl="sdpa")
    with pytest.raises(sc.UnsupportedError, match="it is not run inside transforms"):
        torch.func.grad(lambda q: sc.attention(q, key, value, impl="sdpa").sum())(query)
    assert not is_transformed()


def test_gradients_are_those_of_the_definition():
    tensors = [x.requires_grad_() for x in inputs()]
    made = torch.autograd.grad(sc.attention(*tensors, masks.Causal(), impl="sdpa").square().sum(), tensors)
    want = torch.autograd.grad(sc.attention(*tensors, masks.Causal(), impl="reference").square().sum(), tensors)
    torch.testing.assert_close(made, want)


@pytest.mark.ci
def test_in_a_program_it_stays_outside():
    """The kernel breaks the graph if it is asked for by name; `auto` takes another kernel there."""
    query, key, value = inputs()

    def product(q):
        return sc.attention(q + 1, key, value, masks.Causal(), impl="sdpa") * 2

    torch.testing.assert_close(torch.compile(product, backend="aot_eager")(query), product(query))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match='impl="sdpa" cannot be one operation of a graph'):
        torch.compile(product, backend="aot_eager", fullgraph=True)(query)


def test_groups_of_heads_follow_from_head_counts():
    """Groups of heads follow from the head counts, even if rows are as many as key heads, and keys as many as heads."""
    query, key, value = inputs(2, 4)
    torch.testing.assert_close(*(sc.attention(query, key, value, impl=impl) for impl in ("sdpa", "reference")))


@pytest.mark.parametrize("first", [0, 5])
def test_causal_rows_that_begin_later(first):
    tensors, where = inputs(), range(first, first + 40)
    own = sc.attention(*tensors, masks.Causal(), impl="sdpa", q_positions=where, kv_positions=where)
    torch.testing.assert_close(own, sc.attention(*tensors, masks.Causal(), impl="reference"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_auto_does_not_ask_it_where_there_is_no_other_device(device):
    query, key, _ = (x.to(device) for x in inputs())
    assert sc.AttentionMatrix(query, key).explain().kernel != "sdpa"
