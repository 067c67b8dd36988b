"""Faults put into a small model are found, with pair and layer; right models are not accused."""

import pytest
import torch
from tests.auditing.small_transformer import EvalPattern, Experts, Layer, Mixer, Normed, small
from tests.sampled import sampled

from saccade import masks
from saccade.auditing import audit

WIDTH = 24
CAUSAL, DOCUMENTS = masks.Causal(), masks.Documents([20, 28], rule=masks.Causal())
NEAR = masks.Causal() & masks.Window(7, 0)
PADDED = masks.Causal() & masks.Padding([48, 30], side="left", padded_len=48)


def other(place, mask, **options):
    """A layer with another mask in one place."""
    return lambda: {place: Layer(WIDTH, Mixer(WIDTH, mask, **options))}


FAULTS = {
    "documents leak in one layer": (DOCUMENTS, other(3, CAUSAL), ("reach", "by layer"), "layers.3"),
    "a window one too wide in one layer": (
        NEAR,
        other(3, masks.Causal() & masks.Window(8, 0)),
        ("by layer",),
        "layers.3",
    ),
    "a window one too narrow": (NEAR, other(3, masks.Causal() & masks.Window(6, 0)), ("by layer",), "layers.3"),
    "padding is not masked": (PADDED, other(0, CAUSAL), ("reach", "by layer"), "layers.0"),
    "one layer is not causal": (CAUSAL, other(4, masks.Full()), ("reach", "by layer"), "layers.4"),
    "one layer sees the next token": (CAUSAL, other(4, masks.Window(None, 1)), ("reach", "by layer"), "layers.4"),
    "a leak of 1e-4": (CAUSAL, other(2, CAUSAL, leak=1e-4), ("reach", "by layer"), "layers.2"),
    "a leak of 1e-10": (CAUSAL, other(2, CAUSAL, leak=1e-10), ("by layer",), "layers.2"),
    "a blind spot in one layer": (CAUSAL, other(5, CAUSAL, hidden=24), ("by layer",), "layers.5"),
    "experts with room for a third": (
        CAUSAL,
        lambda: {2: Layer(WIDTH, Mixer(WIDTH, CAUSAL), feed=Experts(WIDTH))},
        ("reach",),
        "layers.2.feed",
    ),
    "another pattern after training": (
        CAUSAL,
        lambda: {0: Layer(WIDTH, EvalPattern(WIDTH, CAUSAL))},
        ("reach", "by layer"),
        "layers.0",
    ),
}


def tokens(batch=2, length=48):
    return torch.randint(40, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.ci
@pytest.mark.parametrize("name", sampled(FAULTS, 3))
def test_a_fault_is_found_with_its_pair_and_its_layer(name):
    rule, changed, broken, where = FAULTS[name]
    padding = torch.arange(48) >= torch.tensor([[0], [18]]) if rule is PADDED else None
    report = audit(small(rule, changed), rule, inputs=tokens(), layers=6, padding=padding)
    assert not report.ok
    for claim in broken:
        assert report[claim].verdict == "broken", str(report)
        assert report[claim].finding.module.startswith(where), str(report)
        assert report[claim].finding.key is not None
    found = next(one for one in report.findings if one.kind == "leak" or one.size == 0.0)
    allowed = rule.to_dense(48, batch=2)[:, 0]
    if found.kind == "leak":
        assert found.row[0] != found.key[0] or not allowed[found.row[0], found.row[1], found.key[1]]


def test_statistics_of_the_batch_are_found():
    model = small(CAUSAL, lambda: {1: Layer(WIDTH, Mixer(WIDTH, CAUSAL), norm=Normed(WIDTH))}).train()
    before = {name: own.clone() for name, own in model.named_buffers()}
    report = audit(model, CAUSAL, inputs=tokens(), layers=6)
    assert report["reach"].verdict == "broken"
    assert report["reach"].finding.module == "layers.1.norm"
    for name, own in model.named_buffers():
        assert torch.equal(own, before[name]), name


RIGHT = {
    "causal": CAUSAL,
    "full": masks.Full(),
    "documents": DOCUMENTS,
    "window": NEAR,
    "both sides": masks.Window(3, 2),
    "prefix": masks.Causal() | masks.Prefix(9),
    "streaming": masks.streaming(2, 5),
    "strided": masks.Causal() & masks.Strided(4),
    "global": masks.Window(2, 2) | masks.Global([0]),
    "blocks": masks.bigbird(8),
    "documents for each item": masks.Documents([[20, 28], [48]], rule=masks.Causal()),
    "itself": masks.Window(0, 0),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", sampled(RIGHT, 4))
def test_a_right_model_is_not_accused(name):
    rule = RIGHT[name]
    report = audit(small(rule), rule, inputs=tokens(), layers=6)
    assert report.ok, str(report)
    assert report.findings == ()


@pytest.mark.slow
def test_two_hundred_right_models_are_not_accused():
    draw = torch.Generator().manual_seed(0)
    rules = [*RIGHT.values()]
    for seed in range(200):
        rule, layers = rules[seed % len(rules)], 1 + int(torch.randint(4, (), generator=draw))
        report = audit(small(rule, layers=layers, seed=seed), rule, inputs=tokens(), layers=layers, seed=seed, tests=6)
        assert report.findings == (), (seed, str(rule), str(report))
