"""Long inputs: few passes, which still find what faults there are."""

import pytest
import torch
from tests.auditing.small_transformer import Layer, Mixer, small

from saccade import audit, masks

LENGTH, WIDTH = 600, 24
CAUSAL, NEAR = masks.Causal(), masks.Causal() & masks.Window(15, 0)
DOCUMENTS = masks.Documents([200, 150, 250], rule=CAUSAL)
TOKENS = torch.randint(40, (1, LENGTH), generator=torch.Generator().manual_seed(3))
FAULTS = {
    "documents leak": (DOCUMENTS, {1: CAUSAL}, {}, ("reach", "by layer")),
    "a window one too wide": (NEAR, {1: masks.Causal() & masks.Window(16, 0)}, {}, ("by layer",)),
    "a window one too narrow": (NEAR, {1: masks.Causal() & masks.Window(14, 0)}, {}, ("by layer",)),
    "one layer sees the next token": (CAUSAL, {1: masks.Window(None, 1)}, {}, ("reach", "by layer")),
    "a leak of 1e-10": (CAUSAL, {1: CAUSAL}, {"leak": 1e-10}, ("by layer",)),
}


class Passes:
    """Counts forward passes of a model, and backward ones through it or one of its modules."""

    def __init__(self, model, monkeypatch):
        self.forward = self.backward = 0
        grad = torch.autograd.grad

        def forward(*arguments):
            self.forward += 1

        def backward(*arguments, **options):
            self.backward += 1
            return grad(*arguments, **options)

        model.head.register_forward_hook(forward)
        monkeypatch.setattr(torch.autograd, "grad", backward)


@pytest.mark.parametrize("rule", [CAUSAL, DOCUMENTS, NEAR], ids=str)
def test_a_right_model_takes_few_passes(rule, monkeypatch):
    model = small(rule, layers=3)
    passes = Passes(model, monkeypatch)
    report = audit(model, rule, inputs=TOKENS)
    assert report.ok, str(report)
    assert report["reach"].largest == report["reach"].allowed == 0.0
    codes = 4 if rule is DOCUMENTS else 0
    assert passes.forward <= 1 + 1 + 12 + codes + 1 + 1  # itself, modules that mix, changes, gradients, replays
    assert passes.backward <= 2 * 2 + 3 * 3  # of two sets of rows, and of three rows of three modules


@pytest.mark.ci
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_few_passes(name, monkeypatch):
    rule, masked, options, broken = FAULTS[name]
    model = small(rule, {place: Layer(WIDTH, Mixer(WIDTH, own, **options)) for place, own in masked.items()}, layers=3)
    passes = Passes(model, monkeypatch)
    report = audit(model, rule, inputs=TOKENS)
    allowed = rule.to_dense(LENGTH)[0, 0]
    for claim in broken:
        found = report[claim].finding
        assert found.module == "layers.1.attention", str(report)
        assert bool(allowed[found.row[1], found.key[1]]) == (found.kind == "blind")
    again = report["by layer"].finding.kind == "blind"  # which is said after float64 says so
    noise, halves, place = 2 + 3, 10, 2
    assert passes.forward <= 16 + 3 + noise + halves + place + 20 * again
    assert passes.backward <= 30 + 20 * again
