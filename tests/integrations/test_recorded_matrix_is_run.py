"""The recorded matrix is the one whose product ran: through every door, for every family, for prompts and steps."""

import pytest
import torch
from tests.integrations import model_zoo as zoo
from tests.integrations.replaceable_models import D, H, One, TimmForm
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import saccade as sc
from saccade import caches, masks, mechanisms
from saccade.integrations.transformers import install
from saccade.matrix import Matrix
from saccade.matrix.algebra import Sum
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.nn import (
    DifferentialAttention,
    Indexer,
    LatentAttention,
    MultiHeadAttention,
    RowAttention,
    TriangleAttention,
)
from saccade.statistics import TopK

X = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def products(monkeypatch):
    """Every product of a matrix and values that runs: the values and the output."""
    ran, depth = [], []

    def logged(original):
        def matmul(self, value, **options):
            depth.append(self)
            try:
                out = original(self, value, **options)
            finally:
                depth.pop()
            if not depth:
                ran.append((value.detach().clone(), out.detach()))  # a cache may write into its values later
            return out

        return matmul

    for kind in (Matrix, Sum, sc.AttentionMatrix, LinearTimeMatrix):
        monkeypatch.setattr(kind, "matmul", logged(kind.matmul))
    return ran


def check(products, run, count):
    """Record a run, and compare each recorded matrix with the product that ran."""
    recorded = []
    products.clear()
    with torch.no_grad(), sc.record(run.model, keep=(), callback=lambda _, matrix: recorded.append(matrix.to_dense())):
        run()
    assert len(products) == len(recorded) == count
    for weights, (value, out) in zip(recorded, products, strict=True):
        values = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
        torch.testing.assert_close(weights @ values, out, atol=1e-5, rtol=1e-5)


class Run:
    """A model and how it is called."""

    def __init__(self, model, *args, **kwargs):
        self.model, self.args, self.kwargs = model, args, kwargs

    def __call__(self):
        return self.model(*self.args, **self.kwargs)


MASKS = [masks.Window(2, 1), masks.streaming(1, 2), masks.Strided(3), masks.Causal() & masks.Window(3, 0)]
MECHANISMS = {
    "softmax": None,
    "softcap": mechanisms.Softmax(softcap=0.5),
    "scale": mechanisms.Softmax(scale=2.0),
    "sink": mechanisms.Softmax(sink_logit=torch.tensor([0.0, 1.0, 2.0, 3.0])),
    "bias": mechanisms.Softmax(bias=sc.positions.ALiBi(H)),
    "linear": mechanisms.Linear(),
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["encoder", "encoder norm first", "timm"])
def test_replaced_in_torch(form, training, mechanism, products):
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.0, batch_first=True, norm_first="first" in form)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(TimmForm(), TimmForm()) if form == "timm" else encoder
    pattern = None if mechanism == "linear" else masks.Window(2, 1)
    sc.replace_attention(model.train(training), mask=pattern, mechanism=MECHANISMS[mechanism])
    check(products, Run(model, X), 2)


@pytest.mark.parametrize("pattern", MASKS, ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_replaced_in_torch_beside_masks_of_the_call(pattern, need_weights, products):
    model = One(batch_first=True).float()
    sc.replace_attention(model, mask=pattern)
    padding = torch.arange(7) < torch.tensor([[7], [5]])
    run = Run(
        model, X, X, X, attn_mask=torch.randn(7, 7), key_padding_mask=padding.float().log(), need_weights=need_weights
    )
    check(products, run, 1)


def test_replaced_in_a_transformer_with_a_decoder(products):
    model = nn.Transformer(D, H, 1, 1, 32, dropout=0.0, batch_first=True).eval()
    sc.replace_attention(model, mask=masks.Window(2, 0))
    check(products, Run(model, X, X[:, :5]), 3)


def by_layer(module):
    """A pattern for some layers."""
    return None if getattr(module, "layer_idx", 0) else masks.Window(2, 0)


DOORS = {
    "replace_attention": lambda network, pattern: sc.replace_attention(network, mask=pattern),
    "install": lambda network, pattern: network.set_attn_implementation(install("s-win", mask=pattern)),
    "install, own name": lambda network, pattern: network.set_attn_implementation(install("saccade-w", mask=pattern)),
    "install, by layer": lambda network, _: network.set_attn_implementation(install("saccade-l", mask=by_layer)),
}


REFUSED: list[tuple[str, str]] = []
PROMPTS = [(door, name) for door in DOORS for name in (*zoo.CAUSAL, "bert") if (door, name) not in REFUSED]
STEPS = [pair for pair in PROMPTS if pair[0] in ("replace_attention", "install, by layer") and pair[1] != "bert"]


@pytest.mark.parametrize("door, name", PROMPTS)
def test_prompts_of_transformers(door, name, products):
    network = zoo.model(name)
    DOORS[door](network, masks.streaming(1, 3))
    check(products, Run(network, **zoo.batch(name)), 2)


@pytest.mark.parametrize("name", zoo.PAIRED)
def test_encoders_and_decoders_of_transformers(name, products):
    network = zoo.model(name)
    DOORS["install, by layer"](network, None)
    check(products, Run(network, **zoo.batch(name)), 6)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("door, name", STEPS)
def test_steps_of_transformers(door, name, cache, products):
    network, inputs = zoo.model(name), zoo.batch(name)
    DOORS[door](network, masks.streaming(1, 3))

    class Generation(Run):
        def __call__(self):
            return self.model.generate(
                **inputs,
                max_new_tokens=4,
                do_sample=False,
                disable_compile=True,
                eos_token_id=-1,
                cache_implementation=cache,
            )

    check(products, Generation(network), 8)


OWN = {
    "plain": lambda: (MultiHeadAttention(D, H, mask=masks.streaming(1, 3)), X),
    "grouped": lambda: (MultiHeadAttention(D, H, num_kv_heads=2, mask=masks.Causal()), X),
    "rotary": lambda: (MultiHeadAttention(D, H, mask=masks.Causal(), rotary=sc.positions.Rotary(D // H)), X),
    "softcap": lambda: (MultiHeadAttention(D, H, mechanism=mechanisms.Softmax(softcap=0.5)), X),
    "sink": lambda: (MultiHeadAttention(D, H, mechanism=MECHANISMS["sink"]), X),
    "differential": lambda: (DifferentialAttention(D, 2, layer=1, mask=masks.Causal()), X),
    "latent": lambda: (LatentAttention(D, H, latent_dim=8, head_dim=6, rotary_dim=2, mask=masks.Causal()), X),
    "indexed": lambda: (
        LatentAttention(
            D,
            H,
            latent_dim=8,
            head_dim=6,
            rotary_dim=2,
            mask=masks.Causal(),
            indexer=Indexer(D, 2, num_heads=2, head_dim=4),
        ),
        X,
    ),
    "selected": lambda: (MultiHeadAttention(D, H, mask=masks.Causal(), mechanism=mechanisms.TopK(2)), X),
    "rows": lambda: (RowAttention(D, H), X[:, None].expand(-1, 3, -1, -1)),
    "triangle": lambda: (TriangleAttention(D, H), X[:, None].expand(-1, 7, -1, -1)),
}


@pytest.mark.parametrize("name", OWN)
def test_layers_of_ours(name, products):
    layer, x = OWN[name]()
    check(products, Run(layer.eval(), x), 1)


def test_a_rule_for_each_layer_of_ours_and_steps_with_a_cache(products):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            near, far = masks.Causal() & masks.Window(2, 0), masks.streaming(1, 4)
            self.layers = nn.ModuleList(MultiHeadAttention(D, H, mask=rule) for rule in (near, far))

        def forward(self, x):
            memory = [caches.KVCache(), caches.KVCache()]
            for part in x.split([4, 1, 2], 1):
                for layer, cache in zip(self.layers, memory, strict=True):
                    layer(part, cache=cache)

    check(products, Run(Two(), X), 6)


def test_statistics_and_answers_are_those_of_the_product_that_ran():
    network, pattern = zoo.model("llama"), masks.streaming(1, 2)
    sc.replace_attention(network, mask=pattern)
    ids = zoo.batch("llama")["input_ids"]
    with torch.no_grad(), sc.record(network, keep=("statistics", "qk", TopK(11))) as recording:
        network(ids)
    hidden = ~(masks.Causal() & pattern).to_dense(11)[0, 0]
    for run in recording.values():
        weights = run.matrix.to_dense()
        assert (weights[..., hidden] == 0).all()
        torch.testing.assert_close(run.statistics["received"], weights.sum(2))
        torch.testing.assert_close(run.statistics["largest_weight"], weights.amax(-1))
        torch.testing.assert_close(run.statistics["first_mass"], weights[..., 0])
        strongest = run.compute(TopK(11))[0]
        torch.testing.assert_close(strongest.weights.sum(-1), torch.ones(2, 4, 11))
        assert ((strongest.weights > 0).sum(-1) == (~hidden).sum(-1)).all()


def near(module, query, key, value, attention_mask, **facts):
    """Somebody's function that joins a window of its own with the mask of each call."""
    window = masks.Window(2, 2).to_dense(query.shape[2], key.shape[2])
    return sdpa_attention_forward(module, query, key, value, attention_mask & window, **facts)


def by_hand(module, query, key, value, attention_mask, scaling, **facts):
    """Somebody's function with operations of its own."""
    del facts
    scores = query @ key.repeat_interleave(2, 1).mT * scaling
    weights = scores.masked_fill(~attention_mask, -1e9).softmax(-1)
    by_hand.weights.append(weights)
    return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), None


def whole_mask(*args, **kwargs):
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})


@pytest.fixture
def somebody_s(monkeypatch):
    """Register somebody's attention function for a model."""

    def registered(function):
        monkeypatch.setitem(AttentionInterface._global_mapping, "somebody", function)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "somebody", whole_mask)
        return zoo.model("llama", "somebody")

    return registered


def test_a_foreign_function_is_recorded_by_its_product(somebody_s):
    network, ids = somebody_s(near), zoo.batch("llama")["input_ids"]
    with torch.no_grad(), sc.record(network, keep="qk") as recording:
        network(ids)
    seen = (masks.Causal() & masks.Window(2, 2)).to_dense(11)[0, 0]
    assert recording.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert torch.equal(recording[0].matrix.to_dense() > 0, seen.expand(2, 4, 11, 11))


def test_a_foreign_function_with_more_operations_is_recorded(somebody_s):
    network, ids = somebody_s(by_hand), zoo.batch("llama")["input_ids"]
    with torch.no_grad(), sc.record(network, keep="qk") as recording:
        by_hand.weights = []
        network(ids)
    for run, expected in zip(recording.values(), by_hand.weights, strict=True):
        torch.testing.assert_close(run.matrix.to_dense(), expected)


@pytest.mark.parametrize("pattern", [masks.Full(), masks.Window(1, 0)], ids=str)
def test_somebody_s_function_that_calls_attention_is_recorded_with_its_mask(pattern, somebody_s):
    def ours(module, query, key, value, attention_mask, scaling, **facts):
        del facts
        rule = attention_mask & pattern.to_dense(11)
        return sc.attention(query, key, value, rule, scale=scaling).transpose(1, 2), None

    network, ids = somebody_s(ours), zoo.batch("llama")["input_ids"]
    with torch.no_grad(), sc.record(network, keep="qk") as recording:
        network(ids)
    assert recording.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    seen = (masks.Causal() & pattern).to_dense(11)[0, 0]
    assert torch.equal(recording[0].matrix.to_dense() > 0, seen.expand(2, 4, 11, 11))
