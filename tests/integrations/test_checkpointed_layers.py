"""Checkpointed layers: recorded, replaced and edited as without a checkpoint, whatever runs the backward pass."""

import functools

import pytest
import torch
from tests.integrations.own_code_attention import D, Model
from tests.intervention.test_intervene import ALL, OwnLayer
from tests.sampled import sampled
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks

L = 6
REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
WITHIN = pytest.mark.parametrize("is_within", [True, False], ids=["within", "after"])
INSIDE = pytest.mark.parametrize("is_inside", [False, True], ids=["around", "inside"])
CUT = masks.Window(2, 1)


class Checkpointed(Model):
    """A model whose blocks, or the attention functions inside them, are checkpointed."""

    def __init__(self, style, use_reentrant, is_inside):
        torch.manual_seed(0)
        super().__init__(style)
        self.use_reentrant, self.is_inside = use_reentrant, is_inside
        if is_inside and use_reentrant is not None:
            for block in self.blocks:
                block.attn.attend = self.checkpointed(block.attn.attend)

    def checkpointed(self, function):
        return lambda *args: checkpoint(function, *args, use_reentrant=self.use_reentrant)

    def forward(self, x, allowed=None):
        for block in self.blocks:
            runs_plain = self.is_inside or self.use_reentrant is None
            x = block(x, allowed) if runs_plain else self.checkpointed(block)(x, allowed)
        return x


def model_of(name, use_reentrant, is_inside):
    """A model; a layer that has no attention function inside is checkpointed as a block."""
    model = Checkpointed(ALL[name], use_reentrant, is_inside and hasattr(ALL[name], "attend")).double()
    if name.startswith("replaced"):
        sc.replace_attention(model, mask=CUT)
    return model


def inputs():
    return torch.linspace(-3, 3, 2 * L * D, dtype=torch.float64).sin().view(2, L, D).requires_grad_()


def layer_of(name, block):
    return f"blocks.{block}.attn" + (".inner" if ALL[name] is OwnLayer else "")


def gradients(model, x):
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [torch.zeros(()) if grad is None else grad for grad in found]


def edited(name, use_reentrant, is_inside, is_within=True):
    """The output and gradients of a step with edits, in one block that changes its edits in between."""
    model, x = model_of(name, use_reentrant, is_inside), inputs()
    with sc.intervene(model) as edit:
        first = model(x).sin().sum()
        edit.scale(layer_of(name, 0), 1, 0.5)
        edit.mask(layer_of(name, 1), [0, 2], CUT)
        second = model(x).sin().sum()
        edit.ablate(layer_of(name, 1), 3)
        third = model(x).sin().sum()
        loss = first + 2 * second + 3 * third
        if is_within:
            loss.backward()
    if not is_within:
        loss.backward()
    assert not any("forward" in vars(part) for part in model.modules())
    return [first, second, third, *gradients(model, x)]


@REENTRANT
@WITHIN
@INSIDE
@pytest.mark.parametrize("name", sampled(ALL, 3))
def test_edits_hold_when_layers_are_computed_again(name, use_reentrant, is_within, is_inside):
    torch.testing.assert_close(edited(name, use_reentrant, is_inside, is_within), edited(name, None, False))


@REENTRANT
@WITHIN
@pytest.mark.parametrize("name", ["written", "saccade", "replaced"])
def test_edits_of_several_interventions(name, use_reentrant, is_within):
    def step(use_reentrant, is_within):
        model, x = model_of(name, use_reentrant, False), inputs()
        part, layer = model.blocks[1], layer_of(name, 1)
        with sc.intervene(model) as outer, sc.intervene(part) as inner:
            outer.scale(layer, 0, 2.0)
            inner.ablate(layer.removeprefix("blocks.1."), 0, "mean")
            outer.mask(layer, 1, CUT)
            loss = model(x).sin().sum()
            if is_within:
                loss.backward()
        if not is_within:
            loss.backward()
        return [loss, *gradients(model, x)]

    torch.testing.assert_close(step(use_reentrant, is_within), step(None, True))


@REENTRANT
def test_a_backward_pass_that_runs_twice(use_reentrant):
    def step(use_reentrant):
        model, x = model_of("written", use_reentrant, True), inputs()
        with sc.intervene(model) as edit:
            edit.scale(layer_of("written", 0), 1, 0.5)
            loss = model(x).sin().sum()
        loss.backward(retain_graph=True)
        edit.scale(layer_of("written", 1), 0, 3.0)
        loss.backward()
        return gradients(model, x)

    torch.testing.assert_close(step(use_reentrant), step(None))


@REENTRANT
@INSIDE
@pytest.mark.parametrize("name", ["written", "einsum", "sdpa", "multihead"])
def test_replaced_attention(name, use_reentrant, is_inside):
    def step(use_reentrant):
        model, x = Checkpointed(ALL[name], use_reentrant, is_inside and name != "multihead").double(), inputs()
        if use_reentrant is not None:
            sc.replace_attention(model, mask=CUT)
        loss = model(x, None if use_reentrant is not None else CUT.to_dense(L)[0, 0]).sin().sum()
        loss.backward()
        return [loss, *gradients(model, x)]

    torch.testing.assert_close(step(use_reentrant), step(None))


class Offloaded(Checkpointed):
    """A model that saves tensors on the CPU inside of its checkpoints."""

    def checkpointed(self, function):
        def offloaded(*args):
            with save_on_cpu():
                return function(*args)

        return super().checkpointed(offloaded)


@REENTRANT
@INSIDE
@pytest.mark.parametrize("is_edited", [False, True], ids=["replaced", "edited"])
@pytest.mark.parametrize("name", ["written", "sdpa", "multihead"])
def test_tensors_that_are_saved_on_the_cpu(name, use_reentrant, is_inside, is_edited):
    def step(kind, use_reentrant):
        torch.manual_seed(0)
        model, x = kind(ALL[name], use_reentrant, is_inside and name != "multihead").double(), inputs()
        if not is_edited:
            sc.replace_attention(model, mask=CUT)
        with sc.intervene(model) as edit:
            if is_edited:
                edit.mask("*", None, CUT)
                edit.scale(layer_of(name, 1), 1, 0.5)
            loss = model(x).sin().sum()
        loss.backward()
        return [loss, *gradients(model, x)]

    expected = step(Checkpointed, None)
    torch.testing.assert_close(step(Offloaded, use_reentrant), expected)
    with save_on_cpu():
        for run in (None, use_reentrant):
            torch.testing.assert_close(step(Checkpointed, run), expected)


@pytest.mark.parametrize("is_edited", [False, True], ids=["replaced", "edited"])
def test_hooks_that_may_recompute_are_refused(is_edited):
    model, x = Checkpointed(ALL["sdpa"], None, False).double(), inputs()
    edit = sc.intervene(model)
    if is_edited:
        edit.ablate("*", 0)
    else:
        sc.replace_attention(model, mask=CUT)
    reason = r"hooks for saved tensors hide a checkpoint[\s\S]*Hint: run the checkpoint outside of the hooks"
    with pytest.raises(sc.UnsupportedError, match=reason), edit, saved_tensors_hooks(lambda x: x, lambda x: x):
        model(x)


@REENTRANT
@WITHIN
@INSIDE
@pytest.mark.parametrize("name", ALL)
def test_recordings(name, use_reentrant, is_within, is_inside):
    def step(use_reentrant, is_within):
        model, x = model_of(name, use_reentrant, is_inside), inputs()
        with sc.record(model, keep=("qk", "gradients")) as recording:
            loss = model(x).sin().sum()
            if is_within:
                loss.backward()
        if not is_within:
            loss.backward()
        assert recording.layers == (layer_of(name, 0), layer_of(name, 1))
        assert [len(recording[layer].calls) for layer in recording] == [1, 1]
        return recording, [loss, *(run.matrix.to_dense() for run in recording.values()), *gradients(model, x)]

    (ours, found), (theirs, expected) = step(use_reentrant, is_within), step(None, True)
    torch.testing.assert_close(found, expected)
    for layer in theirs:
        if use_reentrant:
            with pytest.raises(sc.UnsupportedError, match="as in a reentrant checkpoint"):
                ours.gradients[layer]
        else:
            dense = [recording.gradients[layer].to_dense() for recording in (ours, theirs)]
            torch.testing.assert_close(*dense)


class Residual(nn.Module):
    """Layers that add the scores of the layer before to their own, and return them."""

    def __init__(self, inner, outer):
        super().__init__()
        self.layers = nn.ModuleList(_ResidualLayer() for _ in range(3))
        self.inner, self.outer = inner, outer

    def forward(self, x):
        return self.outer(self.attend, x)

    def attend(self, x):
        scores = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x, scores = self.inner(layer, x, scores)
        return x, scores


class _ResidualLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x, before):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.mT / D**0.5 + before
        return x + scores.softmax(-1) @ v, scores


def called(layer, *args):
    return layer(*args)


HOOKED = functools.partial(checkpoint, use_reentrant=False)


@pytest.mark.parametrize(("inner", "outer"), [(HOOKED, called), (called, HOOKED), (HOOKED, HOOKED)])
@pytest.mark.parametrize("reads_scores", [False, True])
def test_scores_that_leave_a_checkpoint(inner, outer, reads_scores):
    torch.manual_seed(0)
    plain = Residual(called, called).double()
    replaced = Residual(inner, outer).double()
    replaced.load_state_dict(plain.state_dict())
    sc.replace_attention(replaced)

    def step(model):
        x = inputs()
        out, scores = model(x)
        loss = out.sin().sum() + (scores.sin().sum() if reads_scores else 0.0)
        loss.backward()
        return [loss, *gradients(model, x)]

    torch.testing.assert_close(step(replaced), step(plain))
