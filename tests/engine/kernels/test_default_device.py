"""Products make their tensors on the device of their inputs, whatever the default device is."""

import pytest
import torch

import saccade as sc
from saccade import masks, positions, scores
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward
from saccade.engine.kernels.tiled import Tiled

SURE = masks.Causal() & ~masks.Window(3, 0)  # the first rows see nothing
UNSURE = masks.Predicate(lambda b, h, q, kv: (q + kv + h) % 3 != 0)
CALLS = {
    "rows that see nothing": (SURE, {}),
    "sure and unsure strips": (masks.Window(3, 0) | masks.Global((0, 1)), {}),
    "a function": (UNSURE, {}),
    "large scores": (masks.Causal(), {"scale": 100.0}),
    "capped": (masks.Causal(), {"softcap": 2.0}),
    "a bias": (masks.Causal(), {"bias": positions.ALiBi(4)}),
    "changed": (masks.Causal(), {"score": lambda s, b, h, q, kv: s + 0.1 * q * kv}),
    "hidden layer": (masks.Causal(), {"score": scores.Additive(8, 8, 3).double()}),
}


def inputs():
    return [torch.randn(2, heads, 33, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]


def on_cpu_and_beside(call):
    """Return the result of a call with "meta" as the default device, and that of the same call without it."""
    expected = call()
    with torch.device("meta"):
        found = call()
    return found, expected


@pytest.mark.parametrize("impl", ["tiled", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name, impl):
    tensors, (mask, options) = inputs(), CALLS[name]

    def call():
        out, lse = sc.attention_with_lse(*tensors, mask, impl=impl, **options)
        known = lse[lse.isfinite()]
        return out, lse, *torch.autograd.grad(out.sin().sum() + known.sum(), tensors)

    found, expected = on_cpu_and_beside(call)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_dropout(impl):
    tensors = inputs()

    def call():
        out = sc.AttentionMatrix(*tensors[:2], SURE, impl=impl).matmul(tensors[2], dropout_p=0.3, seed=3)
        return out, *torch.autograd.grad(out.sin().sum(), tensors)

    found, expected = on_cpu_and_beside(call)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("name", CALLS)
def test_weights(name):
    (query, key, _), (mask, options) = inputs(), CALLS[name]
    found, expected = on_cpu_and_beside(lambda: sc.AttentionMatrix(query, key, mask, **options).to_dense())
    assert torch.equal(found, expected)


def test_the_tiled_backward_pass_by_itself():
    """The tiled backward pass, called directly, ignores the default device; autograd's own call never sees it."""
    query, key, value = (x.detach() for x in inputs())
    given, kernel, grad = AttentionInputs.of(query, key, masks.Causal()), Tiled(), torch.randn(2, 4, 33, 8).double()
    results = Backward(*kernel.forward(given, value, None), grad, None)
    found, expected = on_cpu_and_beside(lambda: kernel.backward(given, value, None, results, (True, True, True, False)))
    assert [x is None for x in found] == [False, False, False, True]
    for own, other in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(own, other)
