"""replace_attention on modules that attend in their own code: outputs, gradients, masks, training, refusals."""

import copy
import io
import pickle
import warnings
from abc import ABC

import pytest
import torch
from tests.integrations.own_code_attention import (
    FUNCTIONS,
    STYLES,
    Base,
    Block,
    D,
    H,
    Model,
    Seq2Seq,
    StaticCache,
    Written,
    heads,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks, mechanisms

L = 9
WINDOW = masks.Window(2, 0)
ALLOWED = torch.rand(L, L, generator=torch.Generator().manual_seed(1)) < 0.6
ALLOWED.fill_diagonal_(True)


def pair(style, **options):
    """A model, and a copy of it that is to be replaced."""
    torch.manual_seed(0)
    model = Model(STYLES[style], **options).double()
    return model, copy.deepcopy(model)


def inputs(length=L):
    return torch.randn(2, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def assert_same_step(model, changed, run):
    """Assert that two models have equal outputs and gradients of their parameters."""
    expected, got = run(model), run(changed)
    torch.testing.assert_close(got, expected)
    expected.sin().sum().backward()
    got.sin().sum().backward()
    for (name, own), (_, their) in zip(changed.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(own.grad, their.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["full", "masked"])
@pytest.mark.parametrize("style", STYLES)
def test_outputs_and_gradients_are_equal(style, allowed):
    model, changed = pair(style)
    replaced = sc.replace_attention(changed)
    assert len(replaced) == 0
    assert_same_step(model, changed, lambda one: one(inputs(), allowed))
    assert [(one.name, one.how) for one in replaced] == [("blocks.0.attn", "calls"), ("blocks.1.attn", "calls")]


@pytest.mark.parametrize("style", STYLES)
def test_a_pattern_is_joined_with_the_mask_of_the_call(style):
    model, changed = pair(style)
    sc.replace_attention(changed, mask=WINDOW)
    joined = ALLOWED & WINDOW.to_dense(L)[0, 0]
    torch.testing.assert_close(changed(inputs(), ALLOWED), model(inputs(), joined))


@pytest.mark.parametrize("style", STYLES)
def test_cross_attention_gets_no_pattern(style):
    torch.manual_seed(0)
    model = Seq2Seq(STYLES[style]).double()
    changed = copy.deepcopy(model)
    sc.replace_attention(changed, mask=WINDOW)
    x, y = inputs(), inputs() + 1  # of equal lengths
    dense = WINDOW.to_dense(L)[0, 0]
    expected = model.cross(model.decoder(y, allowed=dense), context=model.encoder(x, allowed=dense))
    torch.testing.assert_close(changed(x, y), expected)


def test_masks_by_name_apply_to_named_modules_only():
    torch.manual_seed(0)
    model = Seq2Seq(Written).double()
    changed = copy.deepcopy(model)
    sc.replace_attention(changed, mask={"enc*": WINDOW, "decoder": None, "cross": masks.Causal()})
    x, y = inputs(), inputs() + 1
    memory = model.encoder(x, allowed=WINDOW.to_dense(L)[0, 0])
    expected = model.cross(model.decoder(y), context=memory, allowed=masks.Causal().to_dense(L)[0, 0])
    torch.testing.assert_close(changed(x, y), expected)


class Cached(Base):
    """Attention with a cache of its own, over the latest tokens."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.past = None

    def forward(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        if self.past is not None:
            k, v = torch.cat([self.past[0], k], 2), torch.cat([self.past[1], v], 2)
        self.past = k, v
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_decoding_with_a_cache_is_self_attention():
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": Cached().double()})
    sc.replace_attention(model, mask=masks.Causal() & WINDOW)
    whole = model["one"](inputs())
    model["one"].past = None
    steps = [model["one"](x) for x in inputs().split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


class Pairs(Base):
    """Attention over two inputs, whose names say nothing."""

    def forward(self, first, second):
        q, k, v = heads(self.q(first)), heads(self.k(second)), heads(self.v(second))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_calls_of_unknown_kind_are_refused_and_names_settle_them():
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"one": Pairs().double()}), inputs()
    named, other = copy.deepcopy(model), copy.deepcopy(model)
    sc.replace_attention(model, mask=WINDOW)
    for second in (x + 1, x[:, :4]):
        with pytest.raises(
            sc.UnsupportedError, match=r"one may be self-attention or cross-attention: 9 queries, \d keys"
        ):
            model["one"](x, second)
    plain = other["one"](x, x + 1)
    sc.replace_attention(named, mask=WINDOW, cross_attention=["one"])
    torch.testing.assert_close(named["one"](x, x + 1), plain)
    sc.replace_attention(other, mask=WINDOW, cross_attention=[])
    assert not torch.allclose(other["one"](x, x + 1), plain)
    torch.testing.assert_close(model["one"](x, x), other["one"](x, x))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_gradient_checkpointing(style, use_reentrant):
    model, changed = pair(style)
    sc.replace_attention(changed, mask=WINDOW)

    def run(one, allowed):
        x = inputs().requires_grad_()
        for block in one.blocks:
            x = checkpoint(block, x, allowed, use_reentrant=use_reentrant)
        return x

    dense = WINDOW.to_dense(L)[0, 0]
    assert_same_step(model, changed, lambda one: run(one, dense if one is model else None))


@pytest.mark.parametrize("style", STYLES)
def test_autocast_gives_the_dtype_of_the_model(style):
    model, changed = pair(style)
    model, changed = model.float(), changed.float()
    sc.replace_attention(changed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = model(inputs().float()), changed(inputs().float())
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("style", STYLES)
def test_dropout_drops_while_training_only(style):
    _, changed = pair(style, layers=1, dropout=0.5)
    sc.replace_attention(changed)
    x = inputs()
    torch.testing.assert_close(changed.eval()(x), changed(x))
    changed.train()
    torch.manual_seed(3)
    first = changed(x)
    torch.manual_seed(3)
    torch.testing.assert_close(changed(x), first)
    assert not torch.allclose(changed(x), first)


def test_the_model_is_the_same_object_with_the_same_state():
    model, changed = pair("written")
    parts, heard = [*changed.modules()], []
    changed.blocks[0].register_forward_hook(lambda *_: heard.append("block"))
    sc.replace_attention(changed)
    assert [*changed.modules()] == parts
    assert all(isinstance(one, type(two)) for one, two in zip(changed.modules(), model.modules(), strict=True))
    assert str(changed) == str(model)
    assert changed.state_dict().keys() == model.state_dict().keys()
    changed(inputs())
    assert heard == ["block"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_run_the_same_and_apart_from_the_original(copied):
    model, changed = pair("sdpa")
    replaced = sc.replace_attention(changed, mask=WINDOW)
    again = copied(changed)
    torch.testing.assert_close(again(inputs()), model(inputs(), WINDOW.to_dense(L)[0, 0]))
    assert len(replaced) == 0
    saved = io.BytesIO()
    torch.save(again.state_dict(), saved)
    saved.seek(0)
    changed.load_state_dict(torch.load(saved))


def test_compiled_models_run_eagerly_there_with_a_single_warning():
    model, changed = pair("written")
    sc.replace_attention(changed)
    compiled = torch.compile(changed, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (L, L + 3):
            torch.testing.assert_close(compiled(inputs(length)), model(inputs(length)))
    assert len([one for one in caught if "redirects" in str(one.message)]) <= 1
    with pytest.raises(Exception, match=r"export the model before replace_attention"):
        torch.export.export(changed, (inputs(),))


def test_another_mechanism_and_one_with_parameters():
    _, changed = pair("einsum", layers=1)
    other = copy.deepcopy(changed)
    sc.replace_attention(changed, mechanism=mechanisms.Linear())
    attn, x = other.blocks[0].attn, inputs()
    normed = other.blocks[0].norm(x)
    q, k, v = (heads(part(normed)) for part in (attn.q, attn.k, attn.v))
    out = attn.out((mechanisms.Linear()(q, k) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(changed(x), x + other.blocks[0].mlp(out))
    sc.replace_attention(other, mechanism=mechanisms.Softmax(sink_logit=H))
    with pytest.raises(sc.UnsupportedError, match=r"it has parameters, but attention calls of blocks\.0"):
        other(x)


class Halved(Base):
    """Multiplies a part of the weights, which is not attention over all keys."""

    def attend(self, q, k, v, allowed):
        weights = (q @ k.mT).softmax(-1)
        return weights[..., ::2] @ v[..., ::2, :]


def test_products_that_are_no_attention_are_refused_or_left_alone_and_listed():
    torch.manual_seed(0)
    model = nn.ModuleList([Block(Halved), Block(Written)]).double()
    plain = [block(inputs()) for block in model]
    strict, partial, left = (copy.deepcopy(model) for _ in range(3))
    sc.replace_attention(strict)
    with pytest.raises(
        sc.UnsupportedError, match=r"replace_attention: 0.attn \(Halved\)(.|\n)*multiplies(.|\n)*partial=True"
    ):
        strict[0](inputs())
    replaced = sc.replace_attention(partial, partial=True)
    also = sc.replace_attention(left, leave=["0.*"])
    for changed in (partial, left):
        for block, expected in zip(changed, plain, strict=True):
            torch.testing.assert_close(block(inputs()), expected)
    assert [one.name for one in replaced] == ["0.attn", "1.attn"]
    assert replaced[0].how.startswith("left alone: it multiplies the result of a softmax")
    assert [one.name for one in also] == ["1.attn"]
    assert "left alone" in repr(replaced)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return self.linear(x).relu()


def test_a_model_without_attention_is_refused_when_it_runs():
    model = Plain()
    sc.replace_attention(model)
    with pytest.raises(sc.UnsupportedError, match="no attention ran in it"):
        model(torch.randn(2, D))


def test_a_mask_for_a_module_without_attention_is_refused_when_it_runs():
    _, changed = pair("written")
    sc.replace_attention(changed, mask={"blocks.0": WINDOW, "blocks.1.mlp": WINDOW})
    with pytest.raises(sc.UnsupportedError, match=r"no attention ran in modules named 'blocks.1.mlp'; it ran in"):
        changed(inputs())


def test_a_container_of_torch_is_checked_when_it_runs():
    torch.manual_seed(0)
    model = nn.Sequential(Block(Written), Block(Written)).double()
    sc.replace_attention(model, mask={"0.attn": WINDOW, "1.mlp": WINDOW})
    with pytest.raises(sc.UnsupportedError, match=r"no attention ran in modules named '1.mlp'"):
        model(inputs())
    plain = nn.Sequential(Plain(), nn.ReLU())
    sc.replace_attention(plain)
    with pytest.raises(sc.UnsupportedError, match="no attention ran in it"):
        plain(torch.randn(2, D))


@pytest.mark.parametrize("style", STYLES)
def test_a_recording_hears_what_runs(style):
    model, changed = pair(style)
    sc.replace_attention(changed, mask=WINDOW)
    dense = WINDOW.to_dense(L)[0, 0]
    with sc.record(model, keep="qk") as expected:
        model(inputs(), dense)
    with sc.record(changed, keep="qk") as got:
        changed(inputs())
    assert got.layers == expected.layers == ("blocks.0.attn", "blocks.1.attn")
    for layer in got.layers:
        torch.testing.assert_close(got[layer].matrix.to_dense(), expected[layer].matrix.to_dense())


def test_modules_of_saccade_within_keep_their_mechanism():
    model = nn.ModuleDict({"own": Written().double(), "torch": nn.MultiheadAttention(D, H, batch_first=True).double()})
    sc.replace_attention(model, mechanism=mechanisms.Nystrom(4))
    x = inputs()
    q, k, v = (heads(x) for x in (model["torch"].in_proj_weight @ x.mT).mT.chunk(3, -1))
    expected = model["torch"].out_proj((mechanisms.Nystrom(4)(q, k) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(model["torch"](x, x, x, need_weights=False)[0], expected)


class Abstract(ABC, nn.Module):
    """A class whose objects cannot get a subclass of it and of other modules, because of its first base."""

    def __init__(self):
        super().__init__()
        self.inner = Written()

    def forward(self, x):
        return self.inner(x)


def test_a_class_that_cannot_be_swapped_keeps_its_code_and_its_parts_are_redirected():
    torch.manual_seed(0)
    model = nn.Sequential(Abstract()).double()
    expected = model(inputs())
    replaced = sc.replace_attention(model)
    assert type(model[0]) is Abstract
    torch.testing.assert_close(model(inputs()), expected)
    assert [one.name for one in replaced] == ["0.inner"]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_window_counts_from_the_query_and_not_from_the_free_slots_of_a_cache(function):
    x, rule, steps = inputs(), masks.Window(2, 0), [slice(0, 5), slice(5, 6), slice(6, 9)]
    plain, changed, edited = (nn.Sequential(StaticCache(function, L + 3)) for _ in range(3))
    sc.replace_attention(changed, mask=rule, cross_attention=[])
    with sc.intervene(edited) as edit:
        edit.mask("0", None, rule)
        for step in steps:
            expected = plain[0](x[:, step], rule)
            torch.testing.assert_close(changed(x[:, step]), expected)
            torch.testing.assert_close(edited(x[:, step]), expected)


def test_an_intervention_in_a_part_of_the_model_leaves_the_mask_in_place():
    _, changed = pair("written")
    sc.replace_attention(changed, mask=WINDOW)
    found = []
    for model, layer in ((changed, "blocks.1.attn"), (changed.blocks[1], "attn")):
        with sc.intervene(model) as edit:
            edit.scale(layer, 1, 0.5)
            found.append(changed(inputs()))
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0], changed(inputs()))
