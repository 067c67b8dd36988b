"""torch's causal_lower_right and causal_upper_left mean one mask, whichever argument they are handed over as."""

import copy
import math

import pytest
import torch
from tests.integrations.replaceable_models import D, H, One, TimmForm
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import saccade as sc
from saccade import masks

RULES = {"lower right": causal_lower_right, "upper left": causal_upper_left}
LENGTHS = [(5, 5), (3, 5), (1, 4), (5, 3)]


def made(rule, q_len, kv_len):
    """An object of torch's, its memory filled with what would change any result."""
    bias = RULES[rule](q_len, kv_len)
    bias.as_subclass(torch.Tensor).normal_(std=5.0)
    return bias


def allowed(rule, q_len, kv_len):
    """The definition, pair by pair."""
    shift = kv_len - q_len if rule == "lower right" else 0
    return torch.tensor([[column <= row + shift for column in range(kv_len)] for row in range(q_len)])


def expected(query, key, may_attend):
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~may_attend, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0)


def tensors(q_len, kv_len):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, H, n, 8, dtype=torch.float64, generator=generator) for n in (q_len, kv_len)]


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_functions_take_it_as_mask_and_as_bias(rule, lengths):
    query, key = tensors(*lengths)
    weights = expected(query, key, allowed(rule, *lengths))
    bias = made(rule, *lengths)
    own = torch.rand(lengths) < 0.7
    both = expected(query, key, allowed(rule, *lengths) & own)
    for name in ("mask", "bias"):
        torch.testing.assert_close(sc.AttentionMatrix(query, key, **{name: bias}).to_dense(), weights)
        torch.testing.assert_close(sc.attention(query, key, key, **{name: bias}), weights @ key)
    torch.testing.assert_close(sc.AttentionMatrix(query, key, own, bias=bias).to_dense(), both)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_layers_take_it(rule, name):
    layer = sc.nn.MultiHeadAttention(D, H).double()
    query, key = (torch.randn(2, n, D, dtype=torch.float64) for n in (3, 5))
    got = layer(query, key, **{name: made(rule, 3, 5)})
    torch.testing.assert_close(got, layer(query, key, mask=allowed(rule, 3, 5)))
    assert not torch.allclose(got, layer(query, key))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_replaced_layers_of_torch_take_it(rule, options):
    model = One(batch_first=True, **options)
    query, key = (torch.randn(2, n, D, dtype=torch.float64) for n in (3, 5))
    weights = model(query, key, key, attn_mask=~allowed(rule, 3, 5))
    sc.replace_attention(model)
    for got, their in zip(model(query, key, key, attn_mask=made(rule, 3, 5)), weights, strict=True):
        torch.testing.assert_close(got, their)


@pytest.mark.parametrize("rule", RULES)
def test_replaced_attentions_of_timm_and_whole_encoders_take_it(rule):
    x = torch.randn(2, 5, D, dtype=torch.float64)
    timm = nn.Sequential(TimmForm()).double()
    theirs = timm[0](x, attn_mask=allowed(rule, 5, 5))
    sc.replace_attention(timm)
    torch.testing.assert_close(timm[0](x, attn_mask=made(rule, 5, 5)), theirs)
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).double()
    theirs = encoder(x, mask=~allowed(rule, 5, 5))
    sc.replace_attention(encoder)
    torch.testing.assert_close(encoder(x, mask=made(rule, 5, 5)), theirs)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [*LENGTHS, ((3, 5), (4, 4))], ids=str)
def test_a_recording_of_torchs_product_has_the_mask_that_torch_ran(rule, lengths):
    class Net(nn.Module):
        def forward(self, query, key, bias):
            return F.scaled_dot_product_attention(query, key, key, bias)

    # If the alignment does not depend on lengths, torch does not look at those that the object was made for.
    lengths, own = lengths if isinstance(lengths[0], tuple) else (lengths, lengths)
    query, key = tensors(*lengths)
    net, weights = Net(), expected(query, key, allowed("upper left" if own != lengths else rule, *lengths))
    with sc.record(net, keep="qk") as recording:
        out = net(query, key, made(rule, *own))
    torch.testing.assert_close(out.nan_to_num(0.0), weights @ key)
    torch.testing.assert_close(recording[0].matrix.to_dense(), weights)


def test_torchs_own_layer_which_reads_its_memory_is_not_recorded_as_something_else():
    model = One(batch_first=True)
    model.inner = nn.MultiheadAttention(D, 2, batch_first=True)
    x = torch.randn(1, 5, D)
    with (
        sc.record(model, keep="qk"),
        pytest.raises(TypeError, match="attn_mask must be a tensor with its values in memory"),
    ):
        model(x, x, x, attn_mask=made("lower right", 5, 5))


class Elsewhere(torch.Tensor):
    """A tensor whose values are in another one."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise AssertionError(f"{func} was computed")


class Tagged(torch.Tensor):
    """An ordinary tensor of another class."""


Q = torch.randn(2, H, 5, 8)
X = torch.randn(2, 5, D)
TERMS, PAIRS = torch.randn(5, 5), torch.ones(5, 5, dtype=torch.bool).tril()


def replaced(model):
    sc.replace_attention(model)
    return model


DOORS = {
    "bias": lambda kind: sc.attention(Q, Q, Q, bias=kind(TERMS)),
    "matrix": lambda kind: sc.AttentionMatrix(Q, Q, bias=kind(TERMS)) @ Q,
    "mask": lambda kind: sc.attention(Q, Q, Q, kind(PAIRS)),
    "Dense": lambda kind: sc.attention(Q, Q, Q, masks.Dense(kind(PAIRS))),
    "layer": lambda kind: sc.nn.MultiHeadAttention(D, H)(X, bias=kind(TERMS)),
    "replaced": lambda kind: replaced(One(batch_first=True).float())(X, X, X, attn_mask=kind(TERMS)),
    "timm": lambda kind: replaced(nn.Sequential(TimmForm()))[0](X, attn_mask=kind(TERMS)),
    "words of transformers": lambda kind: masks.from_attention_mask(kind(PAIRS[None, None])).picture(5),
}


@pytest.mark.parametrize("door", DOORS)
def test_subclasses_that_hold_their_values_elsewhere_are_refused(door):
    torch.manual_seed(0)
    with pytest.raises(TypeError, match="must be a tensor with its values in memory; got Elsewhere"):
        DOORS[door](Elsewhere)


@pytest.mark.parametrize("door", DOORS)
def test_subclasses_that_are_ordinary_tensors_pass(door):
    runs = []
    for kind in (torch.Tensor.clone, lambda x: x.as_subclass(Tagged), lambda x: nn.Parameter(x, requires_grad=False)):
        torch.manual_seed(0)
        runs.append(DOORS[door](kind))
    for run in runs[1:]:
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (runs[0], run)), strict=True):
            if isinstance(one, str):
                assert one == other
            else:
                torch.testing.assert_close(one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))


LOWER = causal_lower_right(5, 5)
REFUSED = {
    "other lengths": (lambda: sc.attention(Q, Q, Q, causal_lower_right(3, 5)), "mask must be made for 5 queries and 5"),
    "other lengths of a bias": (lambda: sc.attention(Q, Q, Q, bias=causal_upper_left(5, 4)), "bias must be made for 5"),
    "a part of it": (lambda: sc.attention(Q, Q, Q, LOWER[0]), "mask must be a result of causal_lower_right or"),
    "a sum": (lambda: sc.attention(Q, Q, Q, bias=LOWER + 1.0), "bias must be a result of causal_lower_right or"),
    "Dense": (lambda: masks.Dense(LOWER), "pass it as mask= itself"),
    "positions": (
        lambda: sc.attention(Q, Q, Q, bias=LOWER, q_positions=range(5), kv_positions=range(5)),
        r"bias must be a rule on positions .*; got a CausalBias.\nHint: masks.Causal\(\) is the rule",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_causal_biases_are_refused(name):
    call, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=words) as refusal:
        call()
    assert "bias=" not in str(refusal.value)


@pytest.mark.ci
def test_a_compiled_call_takes_it():
    compiled = torch.compile(
        lambda query, bias: sc.attention(query, query, query, bias=bias), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(Q, made("lower right", 5, 5)), sc.attention(Q, Q, Q, masks.Causal()))


def test_a_copy_is_taken_too():
    torch.testing.assert_close(sc.attention(Q, Q, Q, copy.copy(LOWER)), sc.attention(Q, Q, Q, masks.Causal()))
