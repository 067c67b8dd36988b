"""Nested tensors attend as each of their items would alone: functions, layers, replaced layers, and their gradients."""

import copy

import pytest
import torch
from tests.integrations.replaceable_models import D, H, One, TimmForm
from torch import nn

import saccade as sc
from saccade import caches, masks, mechanisms, positions
from saccade.nn import AttentionPool, DifferentialAttention, EncoderLayer, FeedForward, MultiHeadAttention, Recurrence
from saccade.support.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")

LAYOUTS = {"jagged": torch.jagged, "strided": torch.strided}
# Lengths of queries and keys: self-attention, new queries over more keys, and more queries than keys.
LENGTHS = {"self": ((5, 3, 1, 7), None), "fewer": ((2, 3, 1, 4), (5, 3, 1, 7)), "mixed": ((6, 1, 2, 7), (5, 3, 2, 4))}
RULES = {
    "none": (None, {}),
    "causal": (masks.Causal(), {}),
    "a pattern with a sink": (masks.streaming(1, 2), {}),
    "a grid of global tokens": (masks.Window(1, 1) | masks.Global([0, 2]), {}),
    "a rule for each item": (
        masks.PerItem([masks.Causal(), masks.Window(0, 1), masks.Full(), masks.Window(1, 0)]),
        {},
    ),
    "padding": (masks.Padding([3, 2, 1, 4]), {}),
    "a function": (lambda b, h, q, kv: (q >= kv) | (b % 2 == h % 2), {}),
    "a bias by distance": (masks.Causal(), {"bias": positions.ALiBi(H).double()}),
    "a cap": (masks.Causal(), {"softcap": 2.0, "scale": 0.5, "sink_logit": torch.arange(float(H))}),
}


def nested(lengths, layout, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    items = [torch.randn(length, *shape, dtype=torch.float64, generator=generator) for length in lengths]
    return torch.nested.nested_tensor(items, layout=LAYOUTS[layout], requires_grad=True)


def of_item(mask, item):
    """The rule of one item alone, written by its definition."""
    if isinstance(mask, masks.PerItem):
        return mask.rules[item]
    if isinstance(mask, masks.Padding):
        return masks.Padding([mask.lengths[item]])
    if callable(mask) and not isinstance(mask, masks.Mask):
        return lambda b, h, q, kv: mask(b + item, h, q, kv)
    return mask


def assert_alike(nested_out, items):
    assert nested_out.is_nested
    for got, expected in zip(nested_out.unbind(), items, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_functions_attend_within_each_item(layout, lengths, rule):
    (q_lengths, kv_lengths), (mask, terms) = LENGTHS[lengths], RULES[rule]
    query = nested(q_lengths, layout, H, 8)
    key = query if kv_lengths is None else nested(kv_lengths, layout, H // 2, 8, seed=1)
    q, k = (x.transpose(1, 2) for x in (query, key))
    each = list(zip(q.unbind(), k.unbind(), strict=True))
    expected = [
        sc.attention_with_lse(a[None], b[None], b[None], of_item(mask, item), **terms)
        for item, (a, b) in enumerate(each)
    ]
    out = sc.attention(q, k, k, mask, **terms)
    assert out.layout == LAYOUTS[layout]
    assert_alike(out, [one[0] for one, _ in expected])
    both, lse = sc.attention_with_lse(q, k, k, mask, **terms)
    assert_alike(both, [one[0] for one, _ in expected])
    assert_alike(lse, [one[0] for _, one in expected])
    leaves = (query,) if key is query else (query, key)
    got = torch.autograd.grad(sum(x.sin().sum() for x in out.unbind()), leaves, retain_graph=True)
    their = torch.autograd.grad(sum(x.sin().sum() for x, _ in expected), leaves)
    for one, other in zip(got, their, strict=True):
        assert_alike(one, other.unbind())


def test_a_jagged_result_has_the_lengths_of_the_query():
    x = nested((5, 3), "jagged", H, 8).transpose(1, 2)
    assert (sc.attention(x, x, x) + x).is_nested
    gaps = torch.nested.narrow(torch.randn(2, 6, D), 1, torch.tensor([0, 1]), torch.tensor([3, 4]), layout=torch.jagged)
    layer = MultiHeadAttention(D, H)
    assert_alike(layer(gaps), [layer(item[None])[0] for item in gaps.unbind()])


LAYERS = {
    "plain": dict,
    "a pattern": lambda: {"mask": masks.streaming(1, 2)},
    "a pattern by function": lambda: {"mask": masks.Predicate(lambda b, h, q, kv: q - kv < 2 + h)},
    "rotary, groups and a gate": lambda: {
        "rotary": positions.Rotary(D // H),
        "num_kv_heads": 2,
        "output_gate": True,
    },
    "softmax with a sink": lambda: {"mechanism": mechanisms.Softmax(sink_logit=H, softcap=3.0)},
}


# Alone, a layer with rotary takes no more queries than keys: the first would be before position 0.
COMPARED = [(options, own) for options in LAYERS for own in LENGTHS if not ("rotary" in options and own == "mixed")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("options", "lengths"), COMPARED)
def test_layers_attend_within_each_item(layout, lengths, options):
    torch.manual_seed(0)
    layer = MultiHeadAttention(D, H, **LAYERS[options]()).double()
    q_lengths, kv_lengths = LENGTHS[lengths]
    given = [nested(q_lengths, layout, D)]
    given += [] if kv_lengths is None else [nested(kv_lengths, layout, D, seed=1)]
    mask = masks.Window(3, 3)
    expected = [layer(*(x[None] for x in one), mask=mask)[0] for one in zip(*(x.unbind() for x in given), strict=True)]
    assert_alike(layer(*given, mask=mask), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layers_that_are_made_of_it(layout):
    torch.manual_seed(0)
    x = nested((5, 3, 1), layout, D)
    layers = [DifferentialAttention(D, 2), mechanised()]
    if layout == "jagged":
        layers.append(EncoderLayer(MultiHeadAttention(D, H), FeedForward(D, 32)))
    for layer in layers:
        layer.double()
        assert_alike(layer(x), [layer(item[None])[0] for item in x.unbind()])


def mechanised():
    return MultiHeadAttention(D, H, mechanism=mechanisms.Linear(), mask=masks.Causal())


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double().eval()


PATTERNS = {"none": None, "a pattern": masks.Window(1, 0), "by function": masks.Predicate(lambda b, h, q, kv: kv <= q)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_replaced_layers_attend_within_each_item(layout, pattern):
    model, rule = One(batch_first=True), PATTERNS[pattern]
    theirs = copy.deepcopy(model)
    sc.replace_attention(model, mask=rule)
    x, y = nested((5, 3, 1), layout, D), nested((4, 3, 2), layout, D, seed=1)
    hidden = {n: None if rule is None else ~rule.to_dense(n)[0, 0] for n in (5, 3, 1)}
    expected = [theirs(a, a, a, attn_mask=hidden[len(a)]) for a in x.unbind()]
    out, weights = model(x, x, x)
    assert_alike(out, [one for one, _ in expected])
    padded = torch.stack([nn.functional.pad(one, (0, 5 - len(one), 0, 5 - len(one))) for _, one in expected])
    torch.testing.assert_close(weights, padded)  # as torch's fast path returns them
    got = torch.autograd.grad(sum(one.sin().sum() for one in out.unbind()), x)
    their = torch.autograd.grad(sum(one.sin().sum() for one, _ in expected), x)
    assert_alike(got[0], their[0].unbind())
    if rule is None:
        pairs = zip(x.unbind(), y.unbind(), strict=True)
        assert_alike(model(x, y, y)[0], [theirs(a, b, b)[0] for a, b in pairs])


def test_items_of_other_lengths_are_cross_attention_in_a_replaced_layer():
    model = One(batch_first=True)
    theirs = copy.deepcopy(model)
    sc.replace_attention(model, mask=masks.Window(1, 0), cross_attention=[])
    x, y = nested((5, 3), "jagged", D), nested((2, 6), "jagged", D)  # as many tokens in all
    pairs = zip(x.unbind(), y.unbind(), strict=True)
    assert_alike(model(x, y, y)[0], [theirs(a, b, b)[0] for a, b in pairs])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_encoders_of_torch_take_them_in_inference(pattern):
    model, rule = encoder(), PATTERNS[pattern]
    x = nested((5, 3, 1), "strided", D)
    with torch.no_grad():
        expected = [
            model(item[None], mask=None if rule is None else ~rule.to_dense(len(item))[0, 0])[0] for item in x.unbind()
        ]
        sc.replace_attention(model, mask=rule)
        assert_alike(model(x), expected)
        # One that was made of a replaced layer turns padded batches into nested ones by itself.
        again = nn.TransformerEncoder(model.layers[0], 1).eval()
        padding = torch.arange(5) >= torch.tensor([[5], [3], [1]])
        out = again(x.to_padded_tensor(0.0), src_key_padding_mask=padding)
        for got, item in zip(out, x.unbind(), strict=True):
            torch.testing.assert_close(got[: len(item)], again(item[None])[0])


@pytest.mark.parametrize("lengths", [(5, 3), (2, 6)], ids=str)
def test_a_recording_of_torchs_product_holds_each_item(lengths):
    class Net(nn.Module):
        def forward(self, query, key):
            return torch.nn.functional.scaled_dot_product_attention(query, key, key)

    query, key = (nested(own, "jagged", H, 8).transpose(1, 2) for own in (lengths, (5, 3)))
    net = Net()
    with sc.record(net, keep="qk") as recording:
        out = net(query, key)
    starts = zip((0, lengths[0]), (0, 5), query.unbind(), key.unbind(), out.unbind(), strict=True)
    for row, column, q, k, own in starts:
        expected = (q @ k.mT / 8**0.5).softmax(-1)
        torch.testing.assert_close(expected @ k, own)
        weights = recording[0].matrix.to_dense()[0, :, row : row + q.shape[1]]
        torch.testing.assert_close(weights[..., column : column + k.shape[1]], expected)
        torch.testing.assert_close(weights.sum(-1), torch.ones(H, q.shape[1], dtype=torch.float64))


def test_a_compiled_call_takes_them():
    x = nested((5, 3), "jagged", H, 8).detach().transpose(1, 2)
    compiled = torch.compile(lambda x: sc.attention(x, x, x, masks.Causal()), backend="eager")
    assert_alike(compiled(x), sc.attention(x, x, x, masks.Causal()).unbind())


def replaced(model):
    sc.replace_attention(model)
    return model


Q = nested((5, 3), "jagged", H, 8).transpose(1, 2).detach()
X = nested((5, 3), "jagged", D).detach()
DENSE = torch.randn(2, H, 5, 8, dtype=torch.float64)
REFUSED = {
    "a matrix": (lambda: sc.AttentionMatrix(Q, Q), "AttentionMatrix.*\n.*query is a nested tensor"),
    "a mechanism": (lambda: mechanisms.Linear()(Q, Q), "query is a nested tensor"),
    "nested values alone": (lambda: sc.AttentionMatrix(DENSE, DENSE) @ Q, "value is a nested tensor"),
    "a tensor as mask": (
        lambda: sc.attention(Q, Q, Q, torch.ones(5, 5).bool()),
        "mask= is a tensor, but each item has",
    ),
    "a tensor as bias": (lambda: sc.attention(Q, Q, Q, bias=torch.ones(5, 5)), "bias= is a tensor, but each item has"),
    "a function of scores": (lambda: sc.attention(Q, Q, Q, score=lambda s, *_: s), "score= is a function of items"),
    "positions": (
        lambda: sc.attention(Q, Q, Q, q_positions=range(5)),
        "q_positions= cannot be combined with nested tensors",
    ),
    "a cache": (
        lambda: MultiHeadAttention(D, H)(X, cache=caches.KVCache()),
        "cache= cannot be combined with nested tensors",
    ),
    "positions in a layer": (
        lambda: MultiHeadAttention(D, H)(X, positions=range(5)),
        "positions= cannot be combined with",
    ),
    "the matrix of a layer": (lambda: MultiHeadAttention(D, H).matrix(X), "query is a nested tensor"),
    "pooling": (lambda: AttentionPool(D, H)(X), "AttentionPool.*\n.*x is a nested tensor"),
    "a recurrence": (lambda: Recurrence(D, H)(X), "Recurrence.*\n.*query is a nested tensor"),
    "timm": (lambda: replaced(nn.Sequential(TimmForm()))(X), "x is a nested tensor"),
    "a mask of a replaced layer": (
        lambda: replaced(One(batch_first=True))(X, X, X, attn_mask=torch.zeros(5, 5).bool()),
        "attn_mask= cannot be combined with nested tensors",
    ),
    "a replaced layer that adds keys": (
        lambda: replaced(One(batch_first=True, add_zero_attn=True))(X, X, X),
        "the layer adds its own keys",
    ),
    "dense keys": (lambda: sc.attention(Q, DENSE, DENSE), "key must be nested, because another input is"),
    "items of other dimensions": (
        lambda: sc.attention(X, X, X),
        r"query must be a nested tensor of items \[heads, len",
    ),
    "another number of items": (
        lambda: sc.attention(Q, Q, nested((5, 3, 1), "jagged", H, 8).transpose(1, 2)),
        "the same number",
    ),
    "a domain": (lambda: sc.attention(Q, Q, Q, masks.Dense(torch.ones(4, 4).bool())), "cover the positions of all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_arguments_are_refused(name):
    call, words = REFUSED[name]
    with pytest.raises((UnsupportedError, ValueError), match=words):
        call()
