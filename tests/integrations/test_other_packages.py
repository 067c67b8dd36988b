"""FlexAttention, flash-attn and xformers in a model's code are recorded, replaced and edited.

flash-attn and xformers are not installed: functions with their names, signatures and documented meaning stand for them.
"""

import copy
import sys
import types

import pytest
import torch
from tests.integrations.own_code_attention import Base, D, H, Model
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import saccade as sc
from saccade import masks

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

L = 8
CUT = masks.Window(2, 2)


def definition(q, k, v, allowed, scale=None, bias=None, softcap=None):
    """Attention on ``[batch, len, heads, width]`` by its definition."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if not softcap else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~allowed, -torch.inf)
    return (torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v).transpose(1, 2)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    place = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    left, right = window_size
    allowed = (place >= 0) if causal else torch.ones_like(place, dtype=torch.bool)
    allowed = allowed & ((place <= left) if left >= 0 else True) & ((place >= -right) if right >= 0 else True)
    out = definition(q, k, v, allowed, softmax_scale, softcap=softcap)
    return (out, None, None) if return_attn_probs else out


class LowerTriangularMask:
    pass


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    allowed, bias = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool), None
    if isinstance(attn_bias, LowerTriangularMask):
        allowed = allowed.tril()
    elif attn_bias is not None:
        bias = attn_bias
    if query.dim() == 3:
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
        return definition(query, key, value, allowed, scale, bias).squeeze(2)
    return definition(query, key, value, allowed, scale, bias)


flash_attn_func.__module__ = "flash_attn.flash_attn_interface"
memory_efficient_attention.__module__ = "xformers.ops.fmha"


def causal(b, h, q, kv):
    return q >= kv


def near(score, b, h, q, kv):
    return score - 0.1 * (q - kv).abs()


class Flex(Base):
    def attend(self, q, k, v, allowed):
        block = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cpu")
        return flex_attention(q, k, v, near, block_mask=block)


class Flash(Base):
    def attend(self, q, k, v, allowed):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = flash_attn_func(q, k, v, causal=True, window_size=(4, -1), softmax_scale=0.4, softcap=2.0)
        return out.transpose(1, 2)


class Xformers(Base):
    bias: object = None

    def attend(self, q, k, v, allowed):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return memory_efficient_attention(q, k, v, self.bias).transpose(1, 2)


class XformersCausal(Xformers):
    bias = LowerTriangularMask()


class XformersBias(Xformers):
    bias = torch.randn(1, H, L, L, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class XformersFlat(Base):
    """Without a dimension for heads."""

    def attend(self, q, k, v, allowed):
        shape = q.shape
        out = memory_efficient_attention(*(x.flatten(0, 1) for x in (q, k, v)))
        return out.unflatten(0, shape[:2])


STYLES = {
    "flex": (Flex, {}),
    "flash": (Flash, {}),
    "xformers": (Xformers, {}),
    "xformers causal": (XformersCausal, {}),
    "xformers bias": (XformersBias, {}),
    "xformers flat": (XformersFlat, {}),
}


def model_of(style):
    torch.manual_seed(0)
    return Model(STYLES[style][0]).double()


def inputs():
    return torch.randn(2, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def names_are_restored():
    before = dict(globals())
    yield
    changed = {name for name, value in before.items() if globals()[name] is not value}
    assert not changed or changed <= {"flex_attention", "flash_attn_func", "memory_efficient_attention"}
    globals().update(before)


@pytest.mark.parametrize("style", STYLES)
def test_they_are_replaced_with_equal_outputs_and_gradients(style):
    model = model_of(style)
    changed, x = copy.deepcopy(model), inputs()
    with torch.set_grad_enabled(style != "flex"):  # on CPUs, FlexAttention has no backward pass
        expected = model(x)
    replaced = sc.replace_attention(changed)
    got = changed(x)
    torch.testing.assert_close(got, expected)
    assert [one.how for one in replaced] == ["calls", "calls"]
    got.sin().sum().backward()
    if style != "flex":
        grads = torch.autograd.grad(expected.sin().sum(), list(model.parameters()))
        for own, their in zip(changed.parameters(), grads, strict=True):
            torch.testing.assert_close(own.grad, their)


@pytest.mark.parametrize("style", STYLES)
def test_they_are_recorded_with_gradients(style):
    model, x = model_of(style).requires_grad_(style != "flex"), inputs()
    expected = model(x)
    with sc.record(model, keep=("qk", "gradients")) as recording:
        out = model(x)
    assert torch.equal(out, expected)
    (name, run), *_ = recording.items()
    if style != "flex":
        out.sin().sum().backward()
        assert recording.gradients[name].to_dense().abs().sum() > 0
    # The output of the first attention is that of the recorded matrix and the values.
    block = model.blocks[0]
    v = block.attn.v(block.norm(x)).unflatten(-1, (H, -1)).transpose(1, 2)
    values = v if run.shape[1] == H else v.flatten(0, 1)[:, None]
    product = (run.matrix @ values).reshape(v.shape)
    torch.testing.assert_close(block.attn(block.norm(x)), block.attn.out(product.transpose(1, 2).flatten(2)))
    assert flex_attention.__module__.startswith("torch.")
    assert isinstance(flash_attn_func, types.FunctionType)


@pytest.mark.parametrize("style", STYLES)
def test_they_are_edited(style):
    model, x = model_of(style).requires_grad_(style != "flex"), inputs()
    plain = model(x)
    with sc.intervene(model) as edit, sc.record(model, keep="qk") as recording:
        edit.mask("blocks.0.attn", None, CUT)
        changed = model(x)
    assert not torch.allclose(changed, plain)
    assert not recording[0].matrix.to_dense()[:, :, ~CUT.to_dense(L)[0, 0]].any()
    assert torch.equal(model(x), plain)


class Packed(Base):
    def attend(self, q, k, v, allowed):
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), return_attn_probs=True)[0].transpose(1, 2)


def test_calls_that_cannot_be_converted_are_named():
    torch.manual_seed(0)
    model, x = Model(Packed).double(), inputs()
    with pytest.raises(sc.UnsupportedError, match="could not be recorded"), sc.record(model):
        model(x)
    sc.replace_attention(model)
    with pytest.raises(sc.UnsupportedError, match="it calls flash_attn_func, and it also returns its weights"):
        model(x)


def test_a_compiled_function_is_found():
    names = sys.modules[__name__]
    compiled = torch.compile(flex_attention, backend="eager")
    names.flex_attention = compiled
    model, x = model_of("flex").requires_grad_(False), inputs()
    with sc.record(model, keep="qk") as recording:
        model(x)
    assert len(recording) == 2
    assert names.flex_attention is compiled
    assert scaled_dot_product_attention is torch.nn.functional.scaled_dot_product_attention
