"""torch.nn's transformer layers become ours and back, with equal outputs; or every reason is named."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import saccade as sc
from saccade import masks
from saccade.mechanisms import Softmax
from saccade.nn import (
    DecoderLayer,
    DecoderStack,
    EncoderLayer,
    EncoderStack,
    FeedForward,
    MultiHeadAttention,
    QKNorm,
    from_torch,
    to_torch,
)
from saccade.positions import ALiBi, QueryTemperature, Rotary

OPTIONS = [
    {},
    {"norm_first": True},
    {"batch_first": True, "activation": "gelu"},
    {"batch_first": True, "norm_first": True, "bias": False},
    {"bias": False, "activation": F.silu, "layer_norm_eps": 1e-2},
    {"batch_first": True, "activation": nn.ReLU()},
]


def scattered(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def takes_batch_first(theirs):
    return next(part for part in theirs.modules() if isinstance(part, nn.MultiheadAttention)).batch_first


def run(theirs, *inputs, **options):
    """Torch's module on ``[batch, len, width]``, whatever it takes."""
    if takes_batch_first(theirs):
        return theirs(*inputs, **options)
    return theirs(*(x.transpose(0, 1) for x in inputs), **options).transpose(0, 1)


def converted(theirs):
    """Ours, said to be called with the batch first where torch's was not."""
    return from_torch(theirs, batch_first=None if takes_batch_first(theirs) else True)


def same(one, other):
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, parameter in one.state_dict().items():
        assert torch.equal(parameter, other.state_dict()[name])


def named(options):
    """Without the addresses of functions, which are others in every process."""
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()) or "default"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_encoder_layers(options, training):
    theirs = scattered(nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, **options)).train(training)
    ours = converted(theirs)
    assert isinstance(ours, EncoderLayer)
    assert ours.training == training
    x = torch.randn(3, 6, 16)
    is_padding = torch.arange(6) >= torch.tensor([6, 4, 1])[:, None]
    padding = masks.from_key_padding_mask(is_padding)
    later = torch.ones(6, 6).triu(1).bool()
    torch.testing.assert_close(ours(x), run(theirs, x))
    got, want = ours(x, mask=padding), run(theirs, x, src_key_padding_mask=is_padding)
    torch.testing.assert_close(got[~is_padding], want[~is_padding])
    torch.testing.assert_close(ours(x, mask=masks.Causal()), run(theirs, x, src_mask=later))
    back = to_torch(ours)
    torch.testing.assert_close(back(x), run(theirs, x))
    same(back, theirs)
    assert back.norm1.eps == theirs.norm1.eps
    assert back.training == training


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_decoder_layers(options):
    theirs = scattered(nn.TransformerDecoderLayer(16, 4, 24, **options))
    ours = converted(theirs)
    assert isinstance(ours, DecoderLayer)
    x, memory = torch.randn(3, 6, 16), torch.randn(3, 5, 16)
    later = torch.ones(6, 6).triu(1).bool()
    is_padding = torch.arange(5) >= torch.tensor([5, 4, 1])[:, None]
    hidden = torch.rand(6, 5) < 0.5
    hidden[:, 0] = False
    facts = {"tgt_mask": later, "memory_key_padding_mask": is_padding}
    got = ours(x, memory, mask=masks.Causal(), context_mask=masks.from_key_padding_mask(is_padding))
    torch.testing.assert_close(got, run(theirs, x, memory, **facts))
    torch.testing.assert_close(ours(x, memory, context_mask=~hidden), run(theirs, x, memory, memory_mask=hidden))
    back = to_torch(ours)
    torch.testing.assert_close(back(x, memory, **facts), got)
    same(back, theirs)


@pytest.mark.parametrize("norm", [None, nn.LayerNorm(16)], ids=["bare", "normed"])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=named)
def test_stacks(options, norm):
    layer = nn.TransformerEncoderLayer(16, 4, 24, **options)
    theirs = scattered(nn.TransformerEncoder(layer, 3, copy.deepcopy(norm), enable_nested_tensor=False))
    ours = converted(theirs)
    assert isinstance(ours, EncoderStack)
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(x), run(theirs, x))
    torch.testing.assert_close(to_torch(ours)(x), ours(x))
    same(to_torch(ours), theirs)

    layer = nn.TransformerDecoderLayer(16, 4, 24, **options)
    theirs = scattered(nn.TransformerDecoder(layer, 2, copy.deepcopy(norm)))
    ours = converted(theirs)
    assert isinstance(ours, DecoderStack)
    torch.testing.assert_close(ours(x, memory), run(theirs, x, memory))
    torch.testing.assert_close(to_torch(ours)(x, memory), ours(x, memory))
    same(to_torch(ours), theirs)
    assert len(to_torch(ours).layers) == to_torch(ours).num_layers == 2


def test_nothing_is_shared_and_dropouts_are_kept():
    theirs = nn.TransformerDecoderLayer(16, 4, 24, dropout=0.25)
    theirs.dropout.p, theirs.self_attn.dropout, theirs.multihead_attn.dropout = 0.1, 0.2, 0.3
    ours = converted(theirs)
    assert ours.training
    got = (ours.dropout.p, ours.feed_forward.dropout.p, ours.attention.dropout_p, ours.cross_attention.dropout_p)
    assert got == (0.25, 0.1, 0.2, 0.3)
    back = to_torch(ours)
    got = (back.dropout1.p, back.dropout2.p, back.dropout3.p, back.dropout.p, back.self_attn.dropout)
    assert got == (0.25, 0.25, 0.25, 0.1, 0.2)
    own = {p.data_ptr() for p in ours.parameters()}
    assert own.isdisjoint(p.data_ptr() for p in theirs.parameters())
    assert own.isdisjoint(p.data_ptr() for p in back.parameters())


def test_float64_and_gelu_by_tanh():
    theirs = scattered(nn.TransformerEncoderLayer(16, 4, 24, 0.0, nn.GELU("tanh")).double()).train()
    ours = converted(theirs)
    assert ours.feed_forward.activation == "gelu_tanh"
    x = torch.randn(2, 5, 16).double()
    torch.testing.assert_close(ours(x), run(theirs, x), atol=1e-12, rtol=0)
    torch.testing.assert_close(to_torch(ours)(x), ours(x), atol=1e-12, rtol=0)
    torch.testing.assert_close(from_torch(to_torch(ours))(x), ours(x), atol=1e-12, rtol=0)


def test_shared_heads_are_written_out():
    ours = scattered(EncoderLayer(MultiHeadAttention(16, 4, num_kv_heads=2), FeedForward(16, 8)))
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(to_torch(ours)(x), ours(x))


def test_every_reason_of_torch_s_layer_is_named():
    theirs = nn.TransformerEncoderLayer(16, 4, 24, activation=F.tanh, batch_first=True)
    theirs.dropout1.p = 0.5
    with pytest.raises(sc.UnsupportedError, match="from_torch: a layer of TransformerEncoderLayer") as caught:
        from_torch(theirs)
    assert len(caught.value.reasons) == 2
    assert "is none of relu, gelu" in caught.value.reasons[0]
    assert "different dropout probabilities: [0.1, 0.5]" in caught.value.reasons[1]
    theirs.self_attn = nn.MultiheadAttention(16, 4, add_zero_attn=True, batch_first=True)
    with pytest.raises(sc.UnsupportedError, match="add_zero_attn"):
        from_torch(theirs)


def test_every_reason_of_our_layer_is_named():
    attention = MultiHeadAttention(16, 4, mask=masks.Causal(), rotary=Rotary(4), mechanism=Softmax(bias=ALiBi(4)))
    layer = DecoderLayer(attention, FeedForward(16, 8, gated=True), norm="rms")
    with pytest.raises(sc.UnsupportedError, match=r"to_torch: nn\.TransformerDecoderLayer cannot run") as caught:
        to_torch(layer)
    reasons = "\n".join(caught.value.reasons)
    for said in (
        "it has no cross-attention",
        "attention: it owns the mask Causal",
        "attention: it rotates queries and keys",
        "with bias; torch's",
        "attention_norm is RMSNorm",
        "feed_forward_norm is RMSNorm",
        "feed_forward is gated",
    ):
        assert said in reasons
    assert len(caught.value.reasons) == 7
    plain = EncoderLayer(MultiHeadAttention(16, 4), FeedForward(16, 8))
    with pytest.raises(sc.UnsupportedError, match="layer 1: feed_forward is gated"):
        to_torch(EncoderStack([plain, EncoderLayer(MultiHeadAttention(16, 4), FeedForward(16, 8, gated=True))]))


@pytest.mark.parametrize(
    "layer, message",
    [
        (EncoderLayer(MultiHeadAttention(8, 2), nn.Identity()), "feed_forward is Identity; torch's layer has two"),
        (
            EncoderLayer(MultiHeadAttention(8, 2), FeedForward(8, 8, projection_bias=False)),
            "some of its parts have a bias and some have none",
        ),
        (EncoderLayer(MultiHeadAttention(8, 2), FeedForward(8, 8), norm="layer_without_bias"), "some of its parts"),
        (MultiHeadAttention(8, 2, rotary=Rotary(4)), "it rotates queries and keys by their positions"),
        (MultiHeadAttention(8, 2, mechanism=Softmax(sink_logit=2)), "with sink_logit; torch's module has plain"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_each_reason_alone_refuses(layer, message):
    with pytest.raises(sc.UnsupportedError, match=message):
        to_torch(layer)


def of_each_kind(**options):
    """One module of every class that is converted."""
    encoder, decoder = (kind(16, 4, 24, **options) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
    attention = nn.MultiheadAttention(16, 4, **options)
    stacks = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False), nn.TransformerDecoder(decoder, 2)
    return [scattered(module) for module in (attention, encoder, decoder, *stacks)]


KINDS = [type(module).__name__ for module in of_each_kind()]


ATTENTION_OPTIONS = {
    "num_kv_heads": 2,
    "head_dim": 8,
    "context_dim": 24,
    "mask": masks.Causal(),
    "mechanism": Softmax(scale=0.3),
    "rotary": Rotary(4),
    "qk_norm": QKNorm(),
    "temperature": QueryTemperature(3, 0.7),
    "short_convolution": 3,
    "dropout_p": 0.5,
    "projection_bias": False,
    "output_gate": True,
}


PRESERVED = ("num_kv_heads", "context_dim", "dropout_p", "projection_bias")


@pytest.mark.parametrize("option", ATTENTION_OPTIONS)
def test_every_option_is_refused_or_preserved(option):
    ours = MultiHeadAttention(16, 4, **{option: ATTENTION_OPTIONS[option]}).double().eval()
    query, context = torch.randn(2, 5, 16).double(), None
    if option == "context_dim":
        context = torch.randn(2, 5, 24).double()
    if option in PRESERVED:
        key = query if context is None else context
        torch.testing.assert_close(to_torch(ours)(query, key, key, need_weights=False)[0], ours(query, context))
    else:
        with pytest.raises(sc.UnsupportedError, match="MultiheadAttention"):
            to_torch(ours)


def test_the_options_are_all_options():
    assert {"self", "embed_dim", "num_heads", *ATTENTION_OPTIONS} == {
        *inspect.signature(MultiHeadAttention.__init__).parameters
    }


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_length_first_layers_are_converted_only_if_declared(number):
    theirs = of_each_kind()[number]
    reason = (
        rf"from_torch: {KINDS[number]} cannot run(.|\n)*takes \[len, batch(.|\n)*Hint: from_torch\(module, batch_first"
    )
    with pytest.raises(sc.UnsupportedError, match=reason):
        from_torch(theirs)
    with pytest.raises(ValueError, match=r"from_torch: batch_first must be True, or None .*; got False"):
        from_torch(theirs, batch_first=False)
    from_torch(of_each_kind(batch_first=True)[number], batch_first=True)
    x = torch.randn(6, 3, 16)  # not square: a batch taken for a length gives other numbers
    inputs = (x,) * {"MultiheadAttention": 3, "TransformerDecoderLayer": 2, "TransformerDecoder": 2}.get(
        KINDS[number], 1
    )
    expected = theirs(*inputs)
    ours = from_torch(theirs, batch_first=True)(*(x.transpose(0, 1) for x in inputs))
    torch.testing.assert_close(ours.transpose(0, 1), expected[0] if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("batch_first", [None, True])
def test_parts_of_both_layouts_are_refused(batch_first):
    theirs = nn.TransformerDecoderLayer(16, 4, 24)
    theirs.self_attn.batch_first = True
    with pytest.raises(sc.UnsupportedError, match="batch_first is True in some of its attentions and False in others"):
        from_torch(theirs, batch_first=batch_first)


def test_a_forward_of_its_own_is_refused():
    class Turned(nn.MultiheadAttention):
        def forward(self, query, *args, **kwargs):
            return super().forward(query.flip(1), *args, **kwargs)

    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2)
    theirs.layers[1].self_attn = Turned(16, 4, batch_first=True)
    with pytest.raises(
        sc.UnsupportedError, match=r"layers.1.self_attn is Turned, whose forward is not that of Multihead"
    ):
        from_torch(theirs)
    with pytest.raises(sc.UnsupportedError, match=r"- it is Turned, whose forward is not that of MultiheadAttention"):
        from_torch(theirs.layers[1].self_attn)

    class Backwards(EncoderLayer):
        def forward(self, x, **options):
            return super().forward(x.flip(1), **options)

    ours = Backwards(MultiHeadAttention(16, 4), FeedForward(16, 8))
    with pytest.raises(sc.UnsupportedError, match=r"layers.0 is Backwards, whose forward is not that of EncoderLayer"):
        to_torch(EncoderStack([ours]))


def test_other_modules_are_refused():
    with pytest.raises(TypeError, match=r"from_torch: module must be an nn\.MultiheadAttention, .*; got Linear"):
        from_torch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"to_torch: module must be a saccade\.nn\.MultiHeadAttention, .*; got Linear"):
        to_torch(nn.Linear(2, 2))


def test_quick_gelu_goes_to_torch_and_back():
    ours = scattered(EncoderLayer(MultiHeadAttention(16, 4), FeedForward(16, 8, activation="quick_gelu"))).eval()
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(to_torch(ours)(x), ours(x))
    assert from_torch(to_torch(ours)).feed_forward.activation == "quick_gelu"
