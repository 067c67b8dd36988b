"""intervene: ablation, masks and patterns equal hand-written hooks, on every kind of layer; sweeps; refusals."""

import pytest
import torch
from tests.integrations.own_code_attention import STYLES, D, H, Model, OwnMultihead, heads
from tests.sampled import sampled
from torch import nn

import saccade as sc
from saccade import masks
from saccade.matrix import DenseMatrix

L = 7
CUT = masks.Window(2, 2)


class OwnLayer(nn.Module):
    """A layer of saccade with the arguments of the other styles."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.inner = sc.nn.MultiHeadAttention(D, H)

    def forward(self, x, context=None, allowed=None):
        return self.inner(x, mask=allowed)


# A model that joins heads and batch, as for bmm, has one head, and edits are for all.
SPLIT = {name: style for name, style in STYLES.items() if name != "baddbmm"}
ALL = SPLIT | {"saccade": OwnLayer, "replaced": STYLES["written"], "replaced module": OwnMultihead}


def model_of(style):
    torch.manual_seed(0)
    model = Model((ALL | STYLES)[style]).double().eval()
    if style.startswith("replaced"):
        sc.replace_attention(model)
    return model


def layer_of(style):
    return "blocks.1.attn.inner" if style == "saccade" else "blocks.1.attn"


def inputs(batch=3, seed=2):
    return torch.randn(batch, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def projection_of(model, style):
    """The module that projects the joined outputs of the second layer's heads."""
    attn = model.blocks[1].attn
    return attn.inner.output_projection if style == "saccade" else attn.out


EDITS = {
    "zero": torch.zeros_like,
    "mean": lambda out: out.mean(0, keepdim=True).expand_as(out),
    "resample": lambda out: out.roll(1, 0),
    "half": lambda out: out * 0.5,
}


@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("style", ["written", "einsum", "sdpa", "saccade", "replaced"])
def test_ablations_equal_hooks(style, how):
    model, x = model_of(style), inputs()
    plain = model(x)

    def hook(module, args):
        out = args[0].unflatten(-1, (H, -1)).clone()
        out[:, :, [0, 2]] = EDITS[how](out[:, :, [0, 2]])
        return (out.flatten(2),)

    handle = projection_of(model, style).register_forward_pre_hook(hook)
    expected = model(x)
    handle.remove()
    with sc.intervene(model) as edit:
        if how == "half":
            edit.scale(layer_of(style), [0, 2], 0.5)
        else:
            edit.ablate(layer_of(style), [0, 2], how)
        got = model(x)
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(got, plain)
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("style", [*ALL, "baddbmm"])
def test_a_mask_of_all_heads_equals_the_mask_of_the_model(style):
    model, x = model_of(style), inputs()
    outside = sc.intervene(model)
    outside.mask("blocks.*", None, CUT)
    with outside:
        got = model(x)
    dense = CUT.to_dense(L)[0, 0]
    torch.testing.assert_close(got, model(x, dense))


@pytest.mark.parametrize("style", ALL)
def test_a_mask_of_one_head_changes_that_head_only(style):
    model, x = model_of(style), inputs()
    name = layer_of(style)
    with sc.record(model, keep="qk") as plain:
        model(x)
    with sc.intervene(model) as edit, sc.record(model, keep="qk") as recording:
        edit.mask(name, 1, CUT)
        edit.mask(name, 1, lambda b, h, q, kv: kv != 3)
        model(x)
    with sc.record(model, keep="qk") as other, sc.intervene(model) as edit:
        edit.mask(1, [1], CUT & masks.Predicate(lambda b, h, q, kv: kv != 3))
        model(x)
    allowed = CUT.to_dense(L)[0, 0] & (torch.arange(L) != 3)
    expected = plain[name].matrix.to_dense()
    cut = expected[:, 1] * allowed
    expected[:, 1] = cut / cut.sum(-1, keepdim=True)
    for found in (recording, other):
        torch.testing.assert_close(found[name].matrix.to_dense(), expected)


@pytest.mark.parametrize("style", ALL)
def test_a_patched_pattern_has_the_values_of_this_run(style):
    model, x, y = model_of(style), inputs(), inputs(seed=3)
    name = layer_of(style)
    with sc.record(model, keep="qk") as other:
        model(y)
    with sc.record(model, keep="qk") as plain:
        model(x)
    with sc.intervene(model) as edit, sc.record(model, keep="qk") as recording:
        edit.pattern(name, 2, other)
        model(x)
    expected = plain[name].matrix.to_dense()
    expected[:, 2] = other[name].matrix.to_dense()[:, 2]
    torch.testing.assert_close(recording[name].matrix.to_dense(), expected)
    with sc.intervene(model) as edit:
        edit.freeze(other)
        frozen = model(y)
    torch.testing.assert_close(frozen, model(y))
    with sc.intervene(model) as edit:
        edit.freeze(other)
        assert not torch.allclose(model(x), model_of(style)(x))


def test_a_patched_pattern_equals_a_hand_written_product():
    model, x = model_of("written"), inputs()
    pattern = torch.rand(1, H, L, L, dtype=torch.float64).softmax(-1)
    with sc.intervene(model) as edit:
        edit.pattern("blocks.1.attn", [0, 3], dense(pattern))
        got = model(x)
    hidden = model.blocks[0](x)
    attn, normed = model.blocks[1].attn, model.blocks[1].norm(hidden)
    q, k, v = (heads(part(normed)) for part in (attn.q, attn.k, attn.v))
    weights = (q @ k.mT / 2).softmax(-1)
    weights[:, [0, 3]] = pattern[:, [0, 3]]
    expected = hidden + model.blocks[1].mlp(attn.out((weights @ v).transpose(1, 2).flatten(2)))
    torch.testing.assert_close(got, expected)


def test_rows_of_a_pattern_that_no_call_used_cause_a_warning():
    model, longer = model_of("written"), dense(torch.eye(L + 3, dtype=torch.float64).expand(1, H, -1, -1))
    with pytest.warns(UserWarning, match=rf"'blocks.1.attn' has {L + 3} rows, .* used only the first {L};"):  # noqa: PT031, SIM117
        with sc.intervene(model) as edit:
            edit.pattern("blocks.1.attn", 0, longer)
            model(inputs())


def dense(weights):
    return DenseMatrix(weights)


@pytest.mark.parametrize("style", sampled(ALL, 3))
def test_gradients_pass_through_edits(style):
    model, x = model_of(style), inputs().requires_grad_()
    gate = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64, requires_grad=True)
    with sc.intervene(model) as edit:
        edit.scale(layer_of(style), 1, gate)
        edit.mask(layer_of(style), 0, CUT)

        def run(x, gate):
            edit._edits[0].factor = gate
            return model(x).sin().sum()

        assert torch.autograd.gradcheck(run, (x[:1, :4].detach().requires_grad_(), gate), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("style", ["written", "sdpa", "saccade", "multihead"])
def test_a_sweep_ablates_each_head_once(style, tmp_path):
    model, x = model_of(style), inputs()
    calls = []

    @torch.no_grad()
    def measure():
        calls.append(0)
        return model(x).square().mean()

    sweep = sc.intervene.sweep(model, measure)
    assert len(calls) == 1 + 2 * H
    assert len(sweep) == 2 * H
    assert sweep.baseline == pytest.approx(float(measure()))
    for effect in (sweep[0], sweep[-1]):
        with sc.intervene(model) as edit:
            edit.scale(effect.layer, effect.head, 0.0)
            assert effect.value == pytest.approx(float(measure()))
    assert sweep.strongest(1)[0].difference == max((one.difference for one in sweep), key=abs)
    assert sweep.to_rows()[0].keys() == {"layer", "head", "value", "difference"}
    _, whole, *rows = str(sweep).splitlines()
    assert len(rows) == 2 * H
    assert whole.split() == ["whole", "model", f"{sweep.baseline:.6g}"]
    lines = sweep.to_csv(tmp_path / "sweep.csv").read_text().splitlines()
    assert lines[0] == "layer,head,value,difference"
    assert [line.split(",")[0] for line in lines[1:]] == [one.layer for one in sweep]
    assert len(sc.intervene.sweep(model, measure, layers=[layer_of(style)], how="mean")) == H


@pytest.mark.parametrize(
    "measure, message",
    [
        (torch.ones(3), "measure must be a function that returns a number; got Tensor"),
        (lambda: torch.ones(2, 3), r"measure must return a single number; got a tensor \[2, 3\]"),
        (lambda: None, "measure must return a single number; got None"),
        (lambda: torch.ones(1, dtype=torch.complex64), r"measure must return a single number; got a tensor \[1\]"),
    ],
)
def test_a_measure_that_is_no_number_is_refused(measure, message):
    with pytest.raises(TypeError, match=message):
        sc.intervene.sweep(model_of("sdpa"), measure)


def test_layers_without_edits_run_unchanged_and_nested_contexts_compose():
    model, x = model_of("sdpa"), inputs()
    plain = model(x)
    with sc.intervene(model) as outer:
        assert torch.equal(model(x), plain)
        outer.scale(0, 0, 0.0)
        with sc.intervene(model) as inner:
            inner.scale(0, 1, 0.0)
            both = model(x)
        one = model(x)
    with sc.intervene(model) as edit:
        edit.scale(0, 0, 0.0)
        torch.testing.assert_close(model(x), one)
        edit.scale(0, 1, 0.0)
        torch.testing.assert_close(model(x), both)
    assert not torch.allclose(one, both)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(D, D)

    def forward(self, x):
        for _ in range(2):
            q = heads(x)
            x = (q @ q.mT).softmax(-1) @ q
            x = x.transpose(1, 2).flatten(2)
        return x


def test_a_second_call_of_a_module_has_a_name_of_its_own():
    model, x = nn.ModuleDict({"a": Twice()}), inputs().float()
    with sc.intervene(model) as edit:
        edit.scale("a:1", None, 0.0)
        assert not model["a"](x).any()
        assert edit.layers == ("a", "a:1")


class Halved(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1)[..., ::2] @ x[..., ::2, :]


WRONG = {
    "no layer": (lambda edit: edit.scale("blocks.7", 0, 0.0), ValueError, "layer must be one whose attention ran"),
    "a layer that is no name": (lambda edit: edit.scale(1.5, 0, 0.0), TypeError, "layer must be a name, or a number"),
    "no head": (lambda edit: edit.scale(0, H, 0.0), ValueError, "head must be from 0 to 3 in layer 0"),
    "a head that is no number": (lambda edit: edit.scale(0, "a", 0.0), TypeError, "head must be a number, a list"),
    "a factor": (lambda edit: edit.scale(0, 0, "0"), TypeError, "factor must be a number or a tensor"),
    "a way": (lambda edit: edit.ablate(0, 0, "none"), ValueError, "how must be"),
    "a rule": (lambda edit: edit.mask(0, 0, masks.Causal), TypeError, "rule must be a saccade mask, a bool tensor"),
    "a float rule": (lambda edit: edit.mask(0, 0, torch.zeros(L, L)), TypeError, "rule must be bool if it is a tensor"),
    "a pattern": (lambda edit: edit.pattern(0, 0, torch.zeros(L, L)), TypeError, "source must be a recording or a"),
    "a short pattern": (
        lambda edit: edit.pattern(0, 0, dense(torch.zeros(1, H, 3, 3).double())),
        ValueError,
        "pattern must have the shape of the call",
    ),
    "a pattern of other heads": (
        lambda edit: edit.pattern(0, 0, dense(torch.zeros(1, 2, L, L).double())),
        ValueError,
        "pattern must have the shape of the call",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_edits_are_refused(name):
    make, error, words = WRONG[name]
    model = model_of("sdpa")

    def run():
        with sc.intervene(model) as edit:
            make(edit)
            model(inputs())

    with pytest.raises(error, match=words):
        run()
    assert not any("forward" in vars(part) for part in model.modules())


def test_a_batch_of_one_has_no_other_item():
    model = model_of("sdpa")
    edit = sc.intervene(model)
    edit.ablate(0, 0, "mean")
    with pytest.raises(sc.UnsupportedError, match="the batch has one item"), edit:
        model(inputs(1))


def test_attention_that_cannot_be_edited_is_named():
    model = nn.ModuleDict({"a": Halved()})
    edit = sc.intervene(model)
    edit.scale("a", 0, 0.0)
    with pytest.raises(sc.UnsupportedError, match="a, a Halved"), edit:
        model["a"](torch.randn(2, 4, 4))


@pytest.mark.parametrize("style", ["written", "sdpa", "saccade"])
def test_a_call_that_outlasts_the_block_runs_unedited(style):
    model = model_of(style)
    expected = model(inputs())
    edit = sc.intervene(model)
    edit.ablate(layer_of(style), None)
    handle = model.blocks[1].attn.register_forward_pre_hook(lambda *_: edit.__exit__(ValueError, None, None))
    edit.__enter__()
    torch.testing.assert_close(model(inputs()), expected)
    handle.remove()
