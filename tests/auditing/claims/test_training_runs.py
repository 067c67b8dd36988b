"""Models that compute something else in training, when recomputed, under autocast or compiled."""

import pytest
import torch
from tests.auditing import model_zoo as zoo
from tests.auditing.small_transformer import Layer, Mixer, small
from tests.sampled import kept

from saccade import audit, masks

WIDTH, CAUSAL = 24, masks.Causal()


def tokens():
    return torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(5))


class Sometimes(Mixer):
    """Sees all tokens if a condition holds."""

    def __init__(self, condition):
        super().__init__(WIDTH, CAUSAL)
        self.condition = condition

    def forward(self, x):
        kept = self.mask
        self.mask = masks.Full() if self.condition(self) else kept
        try:
            return super().forward(x)
        finally:
            self.mask = kept


FAULTS = {
    "in training": (lambda own: own.training, "training", "in training, without dropout", "layers.1.attention"),
    "autocast": (lambda own: torch.is_autocast_enabled("cpu"), "training", "under autocast", "layers.1.attention"),
    "compiled": (lambda own: torch.compiler.is_compiling(), "compiled", "compiled", ""),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", FAULTS)
def test_a_model_that_leaks_only_then_is_found(name):
    condition, asked, claim, module = FAULTS[name]
    model = small(CAUSAL, lambda: {1: Layer(WIDTH, Sometimes(condition))}, layers=2)
    report = audit(model, CAUSAL, inputs=tokens(), claims=[asked], tests=2)
    assert [report[one].verdict for one in ("reach", "sight", "by layer")] == ["held"] * 3
    assert report[claim].verdict == "broken", str(report)
    assert report[claim].finding.module == module


def recomputed(fault):
    """A Llama whose first layer attends to other tokens, or with another scale, if it is recomputed."""
    torch.manual_seed(0)
    model = zoo.llama()
    for layer in model.model.layers[:1]:
        attention = type(layer.self_attn)

        class Faulty(attention):
            def forward(self, hidden_states, *args, **kwargs):
                if self.holder[0].gradient_checkpointing and fault:
                    hidden_states = hidden_states * 1.5
                return super().forward(hidden_states, *args, **kwargs)

        layer.self_attn.__class__ = Faulty
        layer.self_attn.holder = (layer,)
    return model


def test_a_layer_that_is_recomputed_wrongly_is_found_with_its_module():
    report = audit(recomputed(fault=True), length=16, claims=["training"], tests=2)
    assert report["in training, without dropout"].verdict == "held", str(report)
    for claim in ("recomputed in the backward pass", "gradients, recomputed"):
        assert report[claim].verdict == "broken", str(report)
    assert report["recomputed in the backward pass"].finding.module == "model.layers.0.self_attn"


RIGHT = {
    "recomputed": lambda: recomputed(fault=False),
    "small": lambda: small(CAUSAL, layers=2),
    "decoder": lambda: zoo.decoder().eval(),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", kept(RIGHT, "recomputed"))
def test_right_models_train_as_they_infer(name):
    report = audit(RIGHT[name](), CAUSAL, length=16, claims=["training", "compiled"], tests=2)
    assert report.findings == (), str(report)
    assert report["under autocast"].verdict == "held"
    assert report["compiled"].verdict in ("held", "not answered")
