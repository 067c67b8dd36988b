"""The width of windows: what was measured is said, and one key more or less is found, with a cache too."""

import pytest
import torch
from tests.auditing import model_zoo as zoo
from tests.auditing.small_transformer import Layer, Mixer, small

from saccade import audit, masks

WIDTH, RULE = 24, masks.Causal() & masks.Window(7, 0)


def tokens():
    return torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("width, kind", [(6, "blind"), (7, None), (8, "leak")])
def test_one_key_more_or_less_is_found(width, kind):
    other = masks.Causal() & masks.Window(width, 0)
    model = small(RULE, lambda: {1: Layer(WIDTH, Mixer(WIDTH, other))}, layers=3)
    claim = audit(model, RULE, inputs=tokens(), claims=["window"], tests=2)["window"]
    assert claim.verdict == ("held" if kind is None else "broken")
    assert "7 keys before the query, 8 including it in layers.0.attention" in claim.why
    if kind is not None:
        assert (claim.finding.kind, claim.finding.module) == (kind, "layers.1.attention")
        assert claim.finding.row[1] - claim.finding.key[1] == max(width, 7)


def test_windows_of_transformers_count_the_row_itself():
    report = audit(zoo.mistral(), length=24, claims=["window"], tests=2)
    assert report["window"].why.startswith("7 keys before the query, 8 including it in model.layers.0.self_attn")
    assert report["steps: cut at 7, window 8"].verdict == report["steps: one by one"].verdict == "held"


def test_a_cache_that_drops_a_key_too_early_is_found():
    model = zoo.mistral()
    inner = model.model.forward

    def forward(*args, past_key_values=None, **kwargs):
        out = inner(*args, past_key_values=past_key_values, **kwargs)
        if out.past_key_values is not None:
            for layer in out.past_key_values.layers:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
                layer.values[:, :, 0] = 0  # the oldest key that a window of 8 still sees
        return out

    model.model.forward = forward
    report = audit(model, length=24, claims=["window"], tests=2)
    assert report["steps: one by one"].verdict == "broken", str(report)
    assert report["window"].verdict == "held"


def test_a_window_wider_than_the_text_is_not_seen():
    model = small(masks.Causal(), layers=2)
    claim = audit(model, masks.Causal(), inputs=tokens(), claims=["window"], tests=2)["window"]
    assert (claim.verdict, claim.why) == ("not answered", "no declared window ends within 24 tokens")
