"""Calls of `saccade.attention` in a user's own module are recorded, like those of any other attention layer."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks
from saccade.matrix.functions import OBSERVERS
from saccade.nn import MultiHeadAttention
from saccade.positions import ALiBi

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3))
OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "terms": {"mask": masks.Window(3, 0), "bias": ALiBi(2), "scale": 0.5, "softcap": 2.0},
    "positions": {"mask": masks.Causal(), "q_positions": range(4, 10), "kv_positions": range(4, 10)},
    "kernel": {"mask": masks.Causal(), "impl": "reference"},
    "sink": {"sink_logit": torch.tensor([0.5, -1.0])},
}


class Direct(nn.Module):
    """A layer of a user, which projects and calls the function itself."""

    def __init__(self, **options):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.options = options
        self.calls = []

    def heads(self, x):
        return self.project(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        query, key, value = self.heads(x)
        out = sc.attention(query, key, value, **self.options)
        self.calls.append((value, out))
        return out.transpose(1, 2).flatten(2)


class Twice(Direct):
    def forward(self, x):
        query, key, value = self.heads(x)
        out, lse = sc.attention_with_lse(query, key, value, masks.Causal())
        again = sc.attention(query, key, out, masks.Window(1, 0))
        self.calls += [(value, out), (out, again)]
        return again.transpose(1, 2).flatten(2) + lse.mean()


def record(model, x=X):
    recorded = []
    with sc.record(model, keep=(), callback=lambda name, matrix: recorded.append((name, matrix))) as recording:
        model(x)
    assert recording.not_recorded == ()
    return recorded


@pytest.mark.parametrize("name", OPTIONS)
def test_the_recorded_matrix_times_the_values_is_what_ran(name):
    model = nn.Sequential(Direct(**OPTIONS[name]), Direct(**OPTIONS[name]))
    recorded = record(model)
    assert [layer for layer, _ in recorded] == ["0", "1"]
    for (_, matrix), layer in zip(recorded, model, strict=True):
        ((value, out),) = layer.calls
        torch.testing.assert_close(matrix.to_dense() @ value, out)


def test_two_calls_of_one_module_are_two_layers():
    model = Twice()
    recorded = record(model)
    assert [layer for layer, _ in recorded] == ["Twice", "Twice:1"]
    for (_, matrix), (value, out) in zip(recorded, model.calls, strict=True):
        torch.testing.assert_close(matrix.to_dense() @ value, out)


def test_layers_of_the_library_beside_it_are_recorded_once():
    model = nn.Sequential(Direct(), MultiHeadAttention(16, 2))
    assert [layer for layer, _ in record(model)] == ["0", "1"]


def test_the_function_outside_of_the_model_is_not_recorded():
    model, query = nn.Sequential(Direct()), torch.randn(1, 2, 3, 8)
    with sc.record(model) as recording:
        sc.attention(query, query, query)
        model(X)
    assert recording.layers == ("0",)


def test_each_of_two_recordings_has_every_call():
    model, outer, inner = Twice(), [], []
    with sc.record(model, keep=(), callback=lambda name, _: outer.append(name)):
        model(X)
        with sc.record(model, keep=(), callback=lambda name, _: inner.append(name)):
            model(X)
    assert inner == ["Twice", "Twice:1"]
    assert outer == inner * 2
    assert OBSERVERS == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_call_is_recorded_once(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Direct(mask=masks.Causal())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model, names, begun = Checkpointed(), [], []
    model.inner.register_forward_pre_hook(lambda *_: begun.append(1))
    with sc.record(model, keep=(), callback=lambda name, _: names.append(name)):
        model(X.clone().requires_grad_()).sum().backward()
    assert len(begun) == 2
    assert names == ["inner"]


def test_nested_tensors_are_recorded_as_one_packed_call():
    class Nested(nn.Module):
        def forward(self, x):
            return sc.attention(x, x, x, masks.Causal())

    items = [torch.randn(n, 2, 8) for n in (3, 5)]
    x = torch.nested.nested_tensor(items, layout=torch.jagged).transpose(1, 2)
    recorded = record(Nested(), x)
    assert [(layer, matrix.shape) for layer, matrix in recorded] == [("Nested", (1, 2, 8, 8))]
    dense = recorded[0][1].to_dense()
    assert dense[:, :, 3:, :3].abs().max() == 0
    torch.testing.assert_close(
        dense[0, :, :3, :3] @ items[0].transpose(0, 1),
        sc.attention(*[items[0].transpose(0, 1)[None]] * 3, masks.Causal())[0],
    )
