"""Inputs under any name, functions around a model, and models whose tensors are [length, batch, width]."""

import pytest
import torch
from torch import nn

from saccade import audit, masks

CAUSAL = masks.Causal()
LAYERS, WIDTH = 2, 16


def ids(batch=2, length=12):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(3))


class GPT(nn.Module):
    """A model like nanoGPT: all rows of logits only if it is given targets."""

    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, idx, targets=None):
        x = self.h(self.e(idx).cumsum(1))
        return x if targets is not None else x[:, [-1]]


class Segments(nn.Module):
    """A model like BERT-pytorch: two tensors of ids, and a mask of ints."""

    def __init__(self):
        super().__init__()
        self.e, self.s = nn.Embedding(50, WIDTH), nn.Embedding(50, WIDTH)

    def forward(self, x, segment_info, xa=None):
        x = self.e(x) + self.s(segment_info)
        return (x if xa is None else x + xa.mean(1, keepdim=True)).cumsum(1)


class Memory(nn.Module):
    """A model like torch's decoder: two tensors of vectors."""

    def forward(self, tgt, memory):
        return tgt.cumsum(1) + memory.mean(1, keepdim=True)


NAMED = {
    "idx": (GPT(), {"idx": ids(), "targets": ids()}, None),
    "idx, last": (GPT(), {"targets": ids() % 7, "idx": ids()}, None),
    "x": (Segments(), {"segment_info": ids() % 2, "x": ids()}, None),
    "x, vectors beside": (Segments(), {"xa": torch.randn(2, 5, WIDTH), "x": ids(), "segment_info": ids() % 2}, None),
    "segment_info": (Segments(), {"segment_info": ids(), "x": ids() % 2}, "segment_info"),
    "tgt": (Memory(), {"memory": torch.randn(2, 5, WIDTH), "tgt": torch.randn(2, 12, WIDTH)}, None),
    "tgt, one tensor": (Memory(), dict.fromkeys(["memory", "tgt"], torch.randn(2, 12, WIDTH)), None),
}


@pytest.mark.parametrize("name", NAMED)
def test_tokens_are_found_under_any_name(name):
    model, inputs, tokens = NAMED[name]
    report = audit(model, CAUSAL, inputs=inputs, tokens=tokens)
    if name == "tgt, one tensor":  # the mean of what is changed, too
        assert report["reach"].verdict == "broken"
    else:
        assert report.ok, str(report)
    assert report.shape == (2, 12)


def test_memory_is_judged_where_it_is_named():
    inputs = {"memory": torch.randn(2, 12, WIDTH), "tgt": torch.randn(2, 12, WIDTH)}
    assert audit(Memory(), masks.Full(), inputs=inputs, tokens="memory").ok
    assert audit(Memory(), CAUSAL, inputs=inputs, tokens="memory")["reach"].verdict == "broken"


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(50, WIDTH)

    def forward(self, scale=1.0, left=None, right=None):
        return (self.e(left) + self.e(right)) * scale


@pytest.mark.parametrize(
    "inputs, tokens, message",
    [
        ({"left": ids(), "right": ids()}, None, 'tokens must be named, .*\nHint: tokens="left" or tokens="right"'),
        ({"left": ids(), "right": ids()}, "middle", "tokens must name a tensor among the inputs; got 'middle'"),
        ({"scale": 2.0}, None, r"inputs must contain token ids \[batch, length\] or embeddings .*; got \['scale'\]"),
        ([ids()], None, "inputs must be a tensor, or a mapping of arguments; got list"),
        (ids(), "idx", "tokens must be left out if inputs= is a single tensor"),
    ],
)
def test_inputs_without_tokens_are_refused(inputs, tokens, message):
    with pytest.raises((ValueError, TypeError), match=message):
        audit(Several(), CAUSAL, inputs=inputs, tokens=tokens)


def test_one_of_several_may_be_named():
    inputs = {"left": ids() % 7, "right": ids()}
    assert audit(Several(), masks.Window(0, 0), inputs=inputs, tokens="right").ok


def test_a_function_around_a_model():
    model = GPT()
    with pytest.raises(ValueError, match=r"module must be given for a function of tokens, .*\n.*module= names the"):
        audit(lambda x: model(x, x), CAUSAL, inputs=ids())
    assert audit(lambda x: model(x, x), CAUSAL, inputs=ids(), module=model).ok
    assert audit(lambda x: model(x, x), CAUSAL, module=model, length=20).shape == (2, 20)
    with pytest.raises(ValueError, match="module must be left out if the model is a module; got GPT"):
        audit(model, CAUSAL, inputs=ids(), module=model)
    with pytest.raises(TypeError, match="module must be the module that a function calls"):
        audit(lambda x: model(x, x), CAUSAL, inputs=ids(), module=lambda x: x)
    with pytest.raises(ValueError, match=r"return rows \[2, 12, ...\].*got \[2, 1, 50\]"):
        audit(model, CAUSAL, inputs=ids())


def test_layers_within_a_function_are_looked_at():
    model = LM("late", masks.Window(5, 0)).eval()
    report = audit(model.forward, CAUSAL & masks.Window(4, 0), inputs=ids(), module=model, layers=LAYERS)
    assert report["by layer"].finding.module == "layers.layers.0.self_attn", str(report)


class LM(nn.Module):
    """torch's encoder in its default layout; the text is turned before or after its vectors are looked up, or never."""

    def __init__(self, turned, rule, last=True):
        super().__init__()
        torch.manual_seed(0)
        self.turned, self.rule, self.last = turned, rule, last
        self.e, self.h = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens):
        if tokens.is_floating_point():
            x = tokens
        elif self.turned == "flat":
            x = self.e(tokens.T.flatten()).view(*tokens.T.shape, -1)
        else:
            x = {"late": lambda: self.e(tokens).transpose(0, 1), "early": lambda: self.e(tokens.T)}.get(
                self.turned, lambda: self.e(tokens)
            )()
        x = self.h(self.layers(x, mask=~self.rule.to_dense(len(x))[0, 0]))
        return x.transpose(0, 1) if self.last else x


SHAPES = [(2, 8), (6, 6), (1, 8), (5, 4)]
NEAR = CAUSAL & masks.Window(2, 0)


@pytest.mark.ci
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("turned, shapes", [("late", SHAPES), ("early", SHAPES[:2]), ("flat", SHAPES[:2])])
def test_time_first_models_are_recognised(turned, shapes, last):
    for batch, length in shapes:
        report = audit(LM(turned, NEAR, last).eval(), NEAR, inputs=ids(batch, length), tests=4)
        assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
        assert report.shape == (batch, length)


@pytest.mark.parametrize("batch, length", SHAPES[:3])
@pytest.mark.parametrize("right, kind", [(masks.Window(1, 0), "blind"), (masks.Window(2, 1), "leak")])
def test_faults_of_time_first_models_are_found(batch, length, right, kind):
    report = audit(LM("late", right).eval(), NEAR, inputs=ids(batch, length), layers=LAYERS)
    found = report["by layer"].finding
    assert (found.kind, found.module) == (kind, "layers.layers.0.self_attn"), str(report)
    if kind == "leak":
        assert report["reach"].finding.module == "layers.layers.0.self_attn"


@pytest.mark.ci
@pytest.mark.parametrize("batch, length", SHAPES[:2])
@pytest.mark.parametrize("as_vectors", [False, True])
def test_time_first_inputs_are_detected(batch, length, as_vectors):
    inputs = torch.randn(length, batch, WIDTH) if as_vectors else ids(batch, length).T
    for last in (True, False):
        model = LM("never", NEAR, last).eval()
        report = audit(model, NEAR, inputs=inputs, batch_first=False)
        assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
        assert report.shape == (batch, length)
    assert audit(model, NEAR, inputs={"tokens": inputs}, batch_first=False, tests=3).ok
    report = audit(model, CAUSAL & masks.Window(3, 0), inputs=inputs, batch_first=False, tests=3)
    assert report["by layer"].finding.kind == "blind"


def test_random_texts_are_time_first_too():
    assert audit(LM("never", NEAR).eval(), NEAR, batch_first=False, length=10).shape == (2, 10)
    with pytest.raises(ValueError, match="batch_first=False"):
        audit(LM("never", NEAR).eval(), NEAR, batch_first=False, packed=[5, 5])


def test_a_square_batch_first_model_is_not_taken_for_the_other():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()
    for rule, verdict in ((masks.Full(), "held"), (CAUSAL, "broken")):
        report = audit(model, rule, inputs=torch.randn(6, 6, WIDTH))
        assert (report["reach"].verdict, report["by layer"].verdict) == (verdict, verdict), str(report)
