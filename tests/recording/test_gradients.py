"""record(keep="gradients"): the gradient by the weights equals that of autograd on weights that are built."""

import pytest
import torch
from tests.integrations.own_code_attention import STYLES, D, H, Model, heads
from tests.integrations.replaceable_models import gpt2
from torch import nn

import saccade as sc
from saccade import masks
from saccade.matrix import ElementwiseProduct

L = 7
ALLOWED = masks.Causal().to_dense(L)[0, 0]


class OwnLayer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.inner = sc.nn.MultiHeadAttention(D, H, dropout_p=dropout)

    def forward(self, x, context=None, allowed=None):
        return self.inner(x, mask=allowed)


ALL = STYLES | {"saccade": OwnLayer}


def projections(attn):
    """The projections of queries, keys, values and outputs of an attention in any style."""
    if isinstance(attn, OwnLayer):
        inner = attn.inner
        return inner.query_projection, inner.key_projection, inner.value_projection, inner.output_projection
    if isinstance(attn, nn.MultiheadAttention):
        weights, biases = attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3)
        made = [
            lambda x, weight=weight, bias=bias: nn.functional.linear(x, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return *made, attn.out_proj
    return attn.q, attn.k, attn.v, attn.out


def built(model, x, allowed):
    """Run a model with weights that are built; return the loss and the weights of each layer."""
    weights = []
    for block in model.blocks:
        query, key, value, out = projections(block.attn)
        normed = block.norm(x)
        q, k, v = (heads(part(normed)) for part in (query, key, value))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
        weights.append(scores.softmax(-1))
        x = x + block.mlp(out((weights[-1] @ v).transpose(1, 2).flatten(2)))
    return x.sin().sum(), weights


def model_of(style, **options):
    torch.manual_seed(0)
    return Model(ALL[style], **options).double()


def inputs():
    return torch.randn(2, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("replaced", [False, True], ids=["own", "replaced"])
@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["full", "causal"])
@pytest.mark.parametrize("style", ALL)
def test_gradients_equal_those_of_autograd(style, allowed, replaced):
    model, x = model_of(style), inputs()
    loss, weights = built(model, x, allowed)
    expected = torch.autograd.grad(loss, weights)
    if replaced and style != "saccade":
        sc.replace_attention(model)
    with sc.record(model, keep=("gradients", "qk")) as recording:
        out = model(x, allowed)
    out.sin().sum().backward()
    assert len(recording.gradients) == 2
    for number, (own, their, weight) in enumerate(zip(recording.gradients, expected, weights, strict=True)):
        got = recording.gradients[own]
        torch.testing.assert_close(got.to_dense().view_as(their), their)
        torch.testing.assert_close(recording.gradients[number].to_dense(), got.to_dense())
        product = ElementwiseProduct(recording[own].matrix, got)
        torch.testing.assert_close(product.to_dense().view_as(their), their * weight.detach())


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saccade"])
def test_gradients_of_models_of_transformers(implementation):
    model, ids = gpt2(), torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    plain = model(ids, labels=ids, output_attentions=True)
    expected = torch.autograd.grad(plain.loss, plain.attentions)
    if implementation == "saccade":
        sc.integrations.transformers.install()
    model.set_attn_implementation(implementation)
    with sc.record(model, keep="gradients") as recording:
        loss = model(ids, labels=ids).loss
    loss.backward()
    for got, their in zip(recording.gradients.values(), expected, strict=True):
        torch.testing.assert_close(got.to_dense(), their, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("style", ["written", "saccade"])
def test_backward_passes_are_added_and_heads_selected(style):
    model, x = model_of(style), inputs()
    loss, weights = built(model, x, None)
    expected = torch.autograd.grad(loss, weights)
    with sc.record(model, heads=[2, 0], keep="gradients") as recording:
        loss = model(x).sin().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for got, their in zip(recording.gradients.values(), expected, strict=True):
        torch.testing.assert_close(got.to_dense(), 2 * their[:, [2, 0]])


class Doubled(nn.Module):
    """Changes its weights after the softmax, so that only the built weights are recorded."""

    def forward(self, x):
        weights = (x @ x.mT).softmax(-1)
        self.weights = weights / weights.amax(-1, keepdim=True)
        return self.weights @ x


def test_gradients_of_weights_that_a_module_builds():
    model, x = nn.ModuleDict({"a": Doubled()}), inputs().requires_grad_()
    with sc.record(model, keep="gradients") as recording:
        loss = model["a"](x).sin().sum()
    (expected,) = torch.autograd.grad(loss, model["a"].weights)
    torch.testing.assert_close(recording.gradients["a"].to_dense()[:, 0], expected)


def unknown(reason):
    return {
        "no backward pass": ({}, lambda model, x: model(x), "no backward pass has reached"),
        "no gradient": ({}, lambda model, x: torch.no_grad()(model)(x), "its output requires no gradient"),
        "dropout": ({"dropout": 0.5}, lambda model, x: model(x).sum().backward(), "dropout was applied to its weights"),
    }[reason]


@pytest.mark.parametrize("style", ALL)
@pytest.mark.parametrize("reason", ["no backward pass", "no gradient", "dropout"])
def test_gradients_that_are_unknown_say_why(reason, style):
    options, run, words = unknown(reason)
    model = model_of(style, **options)
    with sc.record(model, keep="gradients") as recording:
        run(model, inputs())
    with pytest.raises(sc.UnsupportedError, match=words):
        recording.gradients[0]


def test_gradients_that_were_not_kept():
    model = model_of("sdpa")
    with sc.record(model) as recording:
        model(inputs())
    with pytest.raises(sc.UnsupportedError, match=r"gradients of blocks\.0\.attn were not kept"):
        recording.gradients[0]


def test_outputs_and_parameters_gradients_are_unchanged():
    for style in ALL:
        model, x = model_of(style), inputs()
        expected = model(x)
        grads = torch.autograd.grad(expected.sin().sum(), list(model.parameters()))
        with sc.record(model, keep="gradients"):
            got = model(x)
        assert torch.equal(got, expected)
        for own, their in zip(torch.autograd.grad(got.sin().sum(), list(model.parameters())), grads, strict=True):
            assert torch.equal(own, their)


@pytest.mark.ci
def test_long_texts_take_linear_memory():
    import resource  # noqa: PLC0415  only on POSIX

    model, length = Model(STYLES["sdpa"], layers=1), 8192
    x = torch.randn(1, length, D)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with sc.record(model, keep="gradients") as recording:
        loss = model(x).square().sum()
    loss.backward()
    rows = recording.gradients[0][0, 0, 5:7]
    assert rows.shape == (2, length)
    # Weights of four heads would be 1 GB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000
