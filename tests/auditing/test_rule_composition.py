"""Modules that mix without attention are held against the rule of the whole model, and are part of its reach."""

import pytest
import torch
from tests.auditing.small_transformer import Layer, Mixer, Small, small
from torch import nn
from torch.nn import functional as F

from saccade import audit, masks
from saccade.auditing.measured_rules import SeenRow, grouped, measured_rule
from saccade.auditing.reachability import Reach

WIDTH, CAUSAL = 24, masks.Causal()
NEAR = CAUSAL & masks.Window(3, 0)
DOCUMENTS = masks.Documents([11, 13], rule=CAUSAL)


def tokens(batch=2, length=24):
    return torch.randint(40, (batch, length), generator=torch.Generator().manual_seed(5))


class Convolution(nn.Module):
    """Each row mixes ``back`` rows before it and ``ahead`` after it, within texts of the given lengths."""

    def __init__(self, back=2, ahead=0, lengths=None):
        super().__init__()
        self.sides, self.lengths = (back, ahead), lengths
        self.conv = nn.Conv1d(WIDTH, WIDTH, back + ahead + 1)

    def forward(self, x):
        texts = x.split(self.lengths or [x.shape[1]], 1)
        return torch.cat([self.conv(F.pad(one.mT, self.sides)).mT for one in texts], 1)


class Pooling(nn.Module):
    """The mean of each block of four tokens up to this one."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        blocks = self.out(x).unflatten(1, (-1, 4))
        return (blocks.cumsum(2) / torch.arange(1, 5)[:, None]).flatten(1, 2)


class NormOverTime(nn.Module):
    """Divides by the root mean square of all tokens, or of all tokens so far."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal, self.scale = is_causal, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        square = x.square().mean(-1, keepdim=True)
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        mean = square.cumsum(1) / count if self.is_causal else square.mean(1, keepdim=True)
        return self.scale * x / mean.sqrt()


class Canon(Mixer):
    """Attention whose values pass a convolution in a module of its own, as in models with short convolutions."""

    def __init__(self, mask, back=2, ahead=0):
        super().__init__(WIDTH, mask)
        self.short = Convolution(back, ahead)

    def forward(self, x):
        return super().forward(x + self.short(x))


class Stem(Small):
    """A convolution before all layers."""

    def __init__(self, rules, back=2):
        super().__init__(rules)
        self.stem = Convolution(back)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(Mixer):
    """A convolution of its own before attention, which is a module inside."""

    def __init__(self, rule):
        super().__init__(WIDTH, rule)
        self.attention, self.conv = Mixer(WIDTH, rule), nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x):
        return self.attention(x + self.conv(F.pad(x.mT, (2, 0))).mT)


def with_feed(feed, rule=NEAR, layers=3):
    torch.manual_seed(0)
    return small(rule, lambda: {1: Layer(WIDTH, Mixer(WIDTH, rule), feed=feed)}, layers=layers)


def stem():
    torch.manual_seed(0)
    return Stem([NEAR] * 3).eval()


RIGHT = {
    "a convolution beside windows": (lambda: with_feed(Convolution(2)), NEAR, "window(2, 0)"),
    "one wider than a layer's window": (lambda: with_feed(Convolution(6)), NEAR, "window(6, 0)"),
    "a convolution within documents": (
        lambda: with_feed(Convolution(2, lengths=[11, 13]), DOCUMENTS),
        DOCUMENTS,
        "documents & window(2, 0)",
    ),
    "pooling": (lambda: with_feed(Pooling()), NEAR, "within window(3, 0)"),
    "a norm over the past": (lambda: with_feed(NormOverTime(is_causal=True), CAUSAL), CAUSAL, "causal"),
    "a stem before all layers": (stem, NEAR, "window(2, 0)"),
    "a convolution inside of attention": (
        lambda: small(NEAR, lambda: {1: Layer(WIDTH, Canon(NEAR))}, layers=3),
        NEAR,
        "window(2, 0)",
    ),
    "a convolution around attention": (
        lambda: small(NEAR, lambda: {1: Layer(WIDTH, Block(NEAR))}, layers=3),
        NEAR,
        "window(5, 0)",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_models_that_mix_in_two_ways_are_not_accused(name):
    make, rule, measured = RIGHT[name]
    report = audit(make().eval(), rule, inputs=tokens())
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
    assert measured in report.reaches.values(), report.reaches
    assert f"measured {measured}: " in str(report)


WRONG = {
    "a convolution over documents": (lambda: with_feed(Convolution(2), DOCUMENTS), DOCUMENTS, "layers.1.feed"),
    "one that looks ahead": (lambda: with_feed(Convolution(1, 1), CAUSAL), CAUSAL, "layers.1.feed"),
    "one that reaches more than the model": (lambda: with_feed(Convolution(14)), NEAR, "layers.1.feed"),
    "a norm over all time": (lambda: with_feed(NormOverTime(is_causal=False), CAUSAL), CAUSAL, "layers.1.feed"),
    "one inside of attention that looks ahead": (
        lambda: small(CAUSAL, lambda: {1: Layer(WIDTH, Canon(CAUSAL, 1, 1))}, layers=3),
        CAUSAL,
        "layers.1.attention.short",
    ),
    "a convolution over documents around attention": (
        lambda: small(DOCUMENTS, lambda: {1: Layer(WIDTH, Block(DOCUMENTS))}, layers=3),
        DOCUMENTS,
        "layers.1.attention",
    ),
    "attention around a convolution": (
        lambda: small(CAUSAL, lambda: {1: Layer(WIDTH, Canon(masks.Full()))}, layers=3),
        CAUSAL,
        "layers.1.attention",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_leaks_of_other_mixers_are_found_with_their_module(name):
    make, rule, module = WRONG[name]
    report = audit(make().eval(), rule, inputs=tokens())
    for claim in ("reach", "by layer"):
        assert report[claim].verdict == "broken", str(report)
        assert report[claim].finding.module == module, str(report)
    found = report["by layer"].finding
    whole = Reach([rule] * 3, batch=2, length=24)
    assert not whole.sources(whole.one(*found.row))[found.key]


def test_attention_around_a_convolution_must_see_all_of_its_window():
    rule = CAUSAL & masks.Window(9, 0)
    blind = small(rule, lambda: {1: Layer(WIDTH, Canon(CAUSAL & masks.Window(4, 0)))}, layers=3)
    found = audit(blind, rule, inputs=tokens())["by layer"].finding
    assert (found.kind, found.module) == ("blind", "layers.1.attention")


def rows_of(pairs, item=0):
    return [SeenRow((item, place), row) for place, row in enumerate(pairs)]


DESCRIBED = {
    "self": masks.Window(0, 0),
    "window(2, 0)": CAUSAL & masks.Window(2, 0),
    "window(3, 1)": masks.Window(3, 1),
    "causal": CAUSAL,
    "full": masks.Full(),
    "window(any, 2)": masks.Window(None, 2),
    "window(2, any)": masks.Window(2, None),
    "documents & causal": masks.Documents([5, 7], rule=CAUSAL),
    "documents & window(2, 0)": masks.Documents([5, 7], rule=CAUSAL & masks.Window(2, 0)),
    "documents & full": masks.Documents([5, 7]),
    "within window(9, 0)": CAUSAL & masks.Strided(3),
    "within window(4, 0)": CAUSAL & masks.Window(4, 0) & (masks.Strided(4) | masks.Window(0, 0)),
}


@pytest.mark.parametrize("text", DESCRIBED)
def test_a_measured_rule_is_described(text):
    label = (torch.arange(12) >= 5)[None].long() if "documents" in text else torch.zeros(1, 12)
    assert measured_rule(rows_of(DESCRIBED[text].to_dense(12)[0, 0]), label) == text


def test_names_of_one_rule_are_merged():
    names = {f"layers.{place}.attn": "causal" for place in range(4)} | {"layers.1.conv": "window(2, 0)", "stem": "full"}
    assert grouped(names) == ["causal: layers.0-3.attn", "window(2, 0): layers.1.conv", "full: stem"]


def test_pairs_beside_a_rule_are_composed_with_it():
    shift = masks.Window(1, 0).to_dense(9)[:, 0]
    reach = Reach([CAUSAL & masks.Window(2, 0)] * 2, batch=1, length=9, beside={1: [shift]})
    assert reach.sources(reach.one(0, 8))[0].tolist() == [place >= 8 - 2 - 2 - 2 for place in range(9)]
    assert torch.equal(reach.own(1)[0], (CAUSAL & masks.Window(2, 0)).to_dense(9)[0, 0])
