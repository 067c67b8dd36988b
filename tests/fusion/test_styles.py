"""The styles of well-known code bases are fused and observed, with equal outputs and gradients."""

import pytest
import torch
from tests.fusion.agreement import assert_agrees
from tests.fusion.research_styles import STYLES
from tests.fusion.styles import HEADS, WIDTH, N
from torch.utils.checkpoint import checkpoint

from saccade.fusion import FuseAttention, ObserveAttention


@pytest.fixture(params=STYLES.values(), ids=STYLES)
def layer(request):
    return request.param()


@pytest.fixture
def x():
    return torch.randn(2, N, WIDTH, requires_grad=True)


def leaves(layer, x):
    return [x, *layer.parameters()]


def test_fused(layer, x):
    assert_agrees(lambda: layer(x), leaves(layer, x), calls=layer.calls)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("is_within", [False, True])
def test_checkpointed(layer, x, is_reentrant, is_within):
    def grads(fused):
        with FuseAttention() as mode:
            out = checkpoint(layer, x, use_reentrant=is_reentrant) if fused else None
            if is_within and fused:
                out.square().sum().backward()
        assert mode not in torch.overrides._get_current_function_mode_stack()
        if not fused:
            out = layer(x)
        if not (is_within and fused):
            out.square().sum().backward()
        found = [leaf.grad for leaf in leaves(layer, x)]
        for leaf in leaves(layer, x):
            leaf.grad = None
        return [torch.zeros(()) if grad is None else grad for grad in found]

    for ours, theirs in zip(grads(True), grads(False), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("is_within", [False, True])
def test_a_checkpoint_is_fused_when_it_is_recomputed(is_within):
    layer, x, calls = STYLES["NanoGPT"](), torch.randn(2, N, WIDTH, requires_grad=True), []
    with FuseAttention(on_attention=calls.append):
        loss = checkpoint(lambda x: layer(layer(x)), x, use_reentrant=False).sum()
        if is_within:
            loss.backward()
    if not is_within:
        loss.backward()
    assert len(calls) == 4


def test_observed(layer, x):
    calls, left_out = [], []
    with torch.no_grad():
        expected = layer(x)
        with ObserveAttention(calls.append, on_weights=left_out.append):
            assert torch.equal(layer(x), expected)
    assert (len(calls), left_out) == (layer.calls, [])
    fused = []
    with torch.no_grad(), FuseAttention(on_attention=fused.append):
        layer(x)
    for ours, theirs in zip(calls, fused, strict=True):
        torch.testing.assert_close(ours.matrix().to_dense(), theirs.matrix().to_dense())


JOINED = (
    *("Sam", "SamOnFiveAxes", "Diffusers", "NonLocal", "ChannelsFirst", "OldStableDiffusion", "Perceiver"),
    *("LengthsInPlace", "NumberedScores"),
)


@pytest.mark.parametrize("name", sorted(set(STYLES) - {*JOINED}))
def test_batch_and_heads_are_distinguished(name):
    calls, layer = [], STYLES[name]()
    with torch.no_grad(), ObserveAttention(calls.append):
        layer(torch.randn(2, N, WIDTH))
        layer(torch.randn(1, N, WIDTH))
    windows = 2 if name == "Swin" else 1
    sizes = [tuple(call.matrix().shape) for call in calls]
    assert sizes == [(batch * windows, HEADS, N // windows, N // windows) for batch in (2, 1)]


@pytest.mark.parametrize("how", ["repeat", "broadcast", "einsum", "five axes"])
def test_one_query_of_grouped_heads(how):
    q, k = torch.randn(2, 6, 1, 4), torch.randn(2, 1 if how in ("broadcast", "einsum") else 2, 5, 4)
    products = {
        "repeat": lambda: (q @ k.repeat_interleave(3, 1).mT).softmax(-1) @ k.repeat_interleave(3, 1),
        "broadcast": lambda: (q @ k.mT).softmax(-1) @ k,
        "einsum": lambda: torch.einsum(
            "bhnm,bmd->bhnd", torch.einsum("bhnd,bmd->bhnm", q, k[:, 0]).softmax(-1), k[:, 0]
        ),
        "five axes": lambda: (q.view(2, 2, 3, 1, 4) @ k[:, :, None].mT).softmax(-1) @ k[:, :, None],
    }
    calls = []
    with ObserveAttention(calls.append):
        products[how]()
    assert [call.matrix().shape for call in calls] == [(2, 6, 1, 5)]


def test_bfloat16(layer, x):
    layer.bfloat16()
    with torch.no_grad(), FuseAttention(on_attention=(calls := []).append):
        out = layer(x.bfloat16())
    assert len(calls) == layer.calls
    with torch.no_grad():
        torch.testing.assert_close(out, layer(x.bfloat16()), atol=0.03, rtol=0.05)
