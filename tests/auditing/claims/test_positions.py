"""Positions that are ignored, absolute where they should be relative, or read from one axis only."""

import pytest
import torch
from tests.auditing import model_zoo as zoo

from saccade import audit


def llama(change=None):
    """A Llama whose model gets other positions than those that were passed."""
    torch.manual_seed(0)
    model = zoo.llama()
    inner = model.model.forward

    def forward(*args, **kwargs):
        if kwargs.get("position_ids") is not None and change is not None:
            kwargs["position_ids"] = change(kwargs["position_ids"])
        return inner(*args, **kwargs)

    model.model.forward = forward
    return model


FAULTS = {
    "positions are ignored": (lambda places: None, "positions are used", "blind"),
    "positions stop at a limit": (lambda places: places.clamp(max=20), "positions shifted", "differs"),
    "positions are squared": (lambda places: places**2, "positions shifted", "differs"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_positions_is_found(name):
    change, claim, kind = FAULTS[name]
    report = audit(llama(change), length=16, claims=["positions"], tests=2)
    assert report[claim].verdict == "broken", str(report)
    assert report[claim].finding.kind == kind


def test_right_positions_are_not_accused():
    for model in (llama(), zoo.gpt2()):
        report = audit(model, length=16, claims=["positions"], tests=2)
        assert report["positions are used"].verdict == "held", str(report)
        assert report.findings == ()
    assert report["positions shifted"].verdict == "not answered"  # GPT-2 has absolute positions


def qwen(change=None):
    """The text model of Qwen2-VL, with positions of time, height and width."""
    sizes = {**zoo.GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    torch.manual_seed(0)
    model = zoo.of("Qwen2VLTextModel")("Qwen2VLTextConfig", **sizes)
    rotary = model.rotary_emb.forward
    if change is not None:
        model.rotary_emb.forward = lambda x, places, **kwargs: rotary(x, change(places), **kwargs)
    return model


@pytest.mark.parametrize("axis", [1, 2])
def test_an_axis_that_is_not_read_is_found(axis):
    def without(places):
        return torch.stack([places[0] if place == axis else one for place, one in enumerate(places)])

    for change, verdict in ((None, "held"), (without, "broken")):
        report = audit(qwen(change), "causal", length=16, claims=["positions"], tests=2)
        assert report[f"positions are used: axis {axis}"].verdict == verdict, str(report)
        assert report["positions in several axes"].verdict == "held"


def test_a_module_without_positions_is_not_asked():
    torch.manual_seed(0)
    report = audit(zoo.decoder().eval(), length=16, claims=["positions"], tests=2)
    assert report["positions are used"].verdict == "not answered"
    assert report.findings == ()
