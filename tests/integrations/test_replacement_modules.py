"""A replaced attention is the module that it was: class, weights, hooks, references, copies, and torch's checks."""

import copy
import pickle

import pytest
import torch
from tests.integrations.replaceable_models import D, H, One, TimmForm
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import saccade as sc
from saccade import masks
from saccade.support.errors import UnsupportedError

B, L = 2, 7
PATTERN = masks.Window(2, 0)


class Block(nn.Module):
    """Asks what its part is before it calls it, as torch_geometric's GPSConv does."""

    def __init__(self, attn):
        super().__init__()
        self.attn, self.kind, self.plain_list = attn, type(attn), [attn]

    def forward(self, x):
        if not isinstance(self.attn, self.kind):
            return x
        (attn,) = self.plain_list  # a reference that no module tree shows
        return x + (attn(x, x, x)[0] if isinstance(attn, nn.MultiheadAttention) else attn(x))


class Subclass(nn.MultiheadAttention):
    """Adds a method, and computes the same."""

    def width(self):
        return self.embed_dim


def hidden():
    return ~PATTERN.to_dense(L)[0, 0]


def inputs():
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(0))


KINDS = {
    "torch": lambda: nn.MultiheadAttention(D, H, batch_first=True),
    "a subclass": lambda: Subclass(D, H, batch_first=True),
    "timm": TimmForm,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_stays_what_it_was(kind):
    torch.manual_seed(0)
    attn = KINDS[kind]()
    model, x = nn.Sequential(Block(attn)), inputs()
    before, attributes = model(x), set(vars(attn))
    parameters, keys = list(model.named_parameters()), list(model.state_dict())
    (one,) = sc.replace_attention(model)
    assert one.after.startswith(("TorchAttention", "FusedAttention"))
    assert model[0].attn is attn
    assert isinstance(attn, model[0].kind)
    torch.testing.assert_close(model(x), before)
    assert not torch.equal(model(x), x)
    assert [(name, id(own)) for name, own in model.named_parameters()] == [(name, id(own)) for name, own in parameters]
    assert list(model.state_dict()) == keys
    assert attributes <= set(vars(attn))
    assert not isinstance(attn, Subclass) or attn.width() == D


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_and_pickles_compute_the_same(kind, again):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(KINDS[kind]())), inputs()
    sc.replace_attention(model, mask=PATTERN)
    copied = again(model)
    torch.testing.assert_close(copied(x), model(x))
    assert type(copied[0].attn) is type(model[0].attn)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    assert not torch.allclose(model(x), copied(x))


def test_init_functions_and_wrap_policies_find_it():
    model = One(batch_first=True)
    sc.replace_attention(model)
    before = model.inner.in_proj_weight.clone()
    model.apply(lambda part: isinstance(part, nn.MultiheadAttention) and part._reset_parameters())
    assert not torch.equal(model.inner.in_proj_weight, before)
    assert model.inner in ModuleWrapPolicy({nn.MultiheadAttention})._run_policy(model, set(), {})


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def test_torchs_fast_path_does_not_leave_the_pattern_out(fast_path):
    model, x = encoder(), inputs()
    expected = model(x, mask=hidden())
    sc.replace_attention(model, mask=PATTERN)
    assert model.layers[0].self_attn._qkv_same_embed_dim
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
        again = nn.TransformerEncoder(model.layers[0], 1).eval()
        moved = encoder()
        moved.layers[0].self_attn = model.layers[0].self_attn
        torch.testing.assert_close(moved.layers[0](x), again(x))
    assert not fast_path
    model.layers[0].self_attn._forward_pre_hooks.clear()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="fused code bypasses the replaced attention"):
        model(x)
    torch.testing.assert_close(model(x), expected)  # with gradients there is no fast path


@pytest.mark.slow
def test_a_model_that_was_compiled_before_gets_the_pattern():
    model, x = encoder(), inputs()
    expected = model(x, mask=hidden())
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    sc.replace_attention(model, mask=PATTERN)
    torch.testing.assert_close(compiled(x), expected)


def test_a_recording_has_one_matrix_for_each_call():
    model, x = encoder(), inputs()
    sc.replace_attention(model, mask=PATTERN)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), sc.record(model, keep="qk") as recording:
            model(x)
        assert len(recording) == 2
        assert not recording[0].matrix.to_dense()[:, :, hidden()].any()


def changed_on_the_object():
    model = One(batch_first=True)
    model.inner.forward = model.inner.forward
    return model


def test_a_forward_on_the_object_is_refused():
    with pytest.raises(UnsupportedError, match="another library replaced its forward"):
        sc.replace_attention(changed_on_the_object())


def test_a_module_that_is_recorded_is_not_replaced_meanwhile():
    model, x = encoder(), inputs()
    with sc.record(model):
        model(x)
        with pytest.raises(UnsupportedError, match="it is being recorded"):
            sc.replace_attention(model)
    sc.replace_attention(model)


# Self-attention or cross-attention


class Twice(nn.Module):
    """Makes query and key by two calls of one function."""

    def __init__(self, made):
        super().__init__()
        self.attn, self.made = nn.MultiheadAttention(D, H, batch_first=True), made

    def forward(self, x, **masks):
        return self.attn(self.made(x), self.made(x), x, need_weights=False, **masks)[0]


NORM, POSITION = nn.LayerNorm(D), torch.randn(L, D, generator=torch.Generator().manual_seed(1))
MADE = {"norm": NORM, "position": lambda x: x + POSITION, "view": lambda x: x.view(x.shape), "copy": torch.clone}


@pytest.mark.parametrize("made", MADE)
def test_a_pattern_holds_where_query_and_key_are_made_twice(made):
    model, x = Twice(MADE[made]), inputs()
    expected = model(x, attn_mask=hidden())
    sc.replace_attention(model := nn.ModuleDict({"a": model}), mask=PATTERN)
    torch.testing.assert_close(model["a"](x), expected)
    # From now on it is known, so that the query may change alone.
    shifted = model["a"].attn(x + 1, x, x)[0]
    torch.testing.assert_close(shifted, model["a"].attn(x + 1, x, x, attn_mask=hidden())[0])


def test_one_of_another_length_is_cross_attention():
    model, x = One(batch_first=True), torch.randn(B, L, D, dtype=torch.float64)
    expected = model(x[:, 1:], x, x)[0]
    sc.replace_attention(model, mask=PATTERN)
    torch.testing.assert_close(model(x[:, 1:], x, x)[0], expected)


def test_others_of_one_length_are_refused_until_they_are_named():
    x, y = (torch.randn(B, L, D, dtype=torch.float64) for _ in range(2))
    for cross_attention, facts in ((["inner"], {}), (["in*"], {}), ([], {"attn_mask": hidden()})):
        torch.manual_seed(0)
        model = One(batch_first=True)
        expected = model(x, y, y, **facts)[0]
        sc.replace_attention(model, mask=PATTERN, cross_attention=cross_attention)
        torch.testing.assert_close(model(x, y, y)[0], expected)
    model = One(batch_first=True)
    sc.replace_attention(model, mask=PATTERN)
    with pytest.raises(UnsupportedError, match=r"the same length but differ.*\nHint: .*cross_attention=\[names"):
        model(x, y, y)
    zeros = torch.zeros_like(x)
    model(zeros, zeros.clone(), zeros)  # a dry run on one number says nothing
    with pytest.raises(UnsupportedError, match="the same length but differ"):
        model(x, y, y)


def test_nan_does_not_make_them_differ():
    model, x = Twice(NORM), inputs()
    x[0, 3] = torch.nan
    holder = nn.ModuleDict({"a": model})
    sc.replace_attention(holder, mask=PATTERN)
    assert model(x)[1].isfinite().all()
    assert model.attn.is_cross is False


def test_a_decoder_of_torch_has_cross_attention_where_lengths_are_equal():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(D, H, 32, dropout=0.0, batch_first=True)
    model, x, y = nn.TransformerDecoder(layer, 2), inputs(), inputs() + 1
    expected = model(x, y, tgt_mask=hidden())
    sc.replace_attention(model, mask=PATTERN)
    torch.testing.assert_close(model(x, y), expected)


NAMES = {
    "a string": ("inner", r"cross_attention must be a list of names, or None; got 'inner'"),
    "no strings": ([1], "cross_attention must contain module names; got 1"),
    "another name": (["other"], "cross_attention must contain names of modules of the model; got 'other'"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_name_nothing_are_refused(name):
    model = One()
    with pytest.raises((TypeError, ValueError), match=NAMES[name][1]):
        sc.replace_attention(model, mask=PATTERN, cross_attention=NAMES[name][0])
    assert type(model.inner) is nn.MultiheadAttention
