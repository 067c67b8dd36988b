"""A gradient of 0 is called blind only if no other input and no wider float shows that the token is seen."""

import pytest
import torch
import transformers
from tests.auditing.small_transformer import Layer, Mixer, small
from torch import nn

from saccade import audit, masks
from saccade.auditing.by_layer import ByLayer
from saccade.auditing.model_under_test import ModelUnderTest
from saccade.auditing.zero_gradients import Probe

WIDTH, LENGTH = 24, 64
CAUSAL = masks.Causal()
SIZES = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2}


def tokens(length=LENGTH):
    return torch.randint(40, (2, length), generator=torch.Generator().manual_seed(5))


def saturated(hidden=None):
    """Return a model with queries so large that most softmax weights underflow in float32."""
    model = small(CAUSAL, lambda: {1: Layer(WIDTH, Mixer(WIDTH, CAUSAL, hidden=hidden))}, layers=2)
    for layer in model.layers:
        with torch.no_grad():
            layer.attention.made.weight[:WIDTH] *= 100
    return model


class Recurrence(nn.Module):
    """The recurrence x_1, x_2 + r x_1, ...; the token ``hidden``, if given, is left out."""

    def __init__(self, rate, hidden=None, only_float32=False):
        super().__init__()
        self.rate, self.hidden, self.only_float32 = rate, hidden, only_float32
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.only_float32 and x.dtype is not torch.float32:
            raise NotImplementedError("a kernel for float32 alone")
        state, rows = torch.zeros_like(x[:, 0]), []
        for place, value in enumerate(self.value(x).unbind(1)):
            state = state * self.rate + (0 if place == self.hidden else value)
            rows.append(state)
        return torch.stack(rows, 1)


def recurrent(rate, **options):
    return small(CAUSAL, lambda: {0: Layer(WIDTH, Recurrence(rate, **options))}, layers=1)


def is_zero_somewhere(model, name, inputs):
    """Return whether the last row of a module has a gradient of 0 by an earlier token, in the model's own dtype."""
    subject = ModelUnderTest(model, inputs)
    last = Probe(name, 0, inputs.shape[1] - 1)
    whole = torch.ones(inputs.shape, dtype=torch.bool)
    probes = ByLayer(subject, {name: whole[0]}, whole)
    return bool((probes._measure_gradients(subject, False, lambda *of: [last], [name])[last] == 0).any())


def test_a_saturated_softmax_is_not_blind():
    model = saturated()
    assert is_zero_somewhere(model, "layers.1.attention", tokens())
    report = audit(model, CAUSAL, inputs=tokens())
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
    assert [claim.why for claim in report.claims] == [""] * 3


def test_a_hidden_token_is_blind_beside_a_saturated_softmax():
    found = audit(saturated(hidden=24), CAUSAL, inputs=tokens())["by layer"].finding
    assert (found.kind, found.module, found.key[1]) == ("blind", "layers.1.attention", 24)


def qwen3_next(rate):
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES, **sizes))
    model.model.layers[0].linear_attn.A_log.data.fill_(rate)
    return model, "model.layers.0.linear_attn"


def mamba2(rate):
    sizes = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**SIZES, **sizes))
    for layer in model.backbone.layers:
        layer.mixer.A_log.data.fill_(rate)
        layer.mixer.dt_bias.data.fill_(0.5)
    return model, "backbone.layers.0.mixer"


@pytest.mark.ci
@pytest.mark.parametrize(
    "make, length, rate, decayed",
    [
        (mamba2, 64, 1.5, False),
        (qwen3_next, 64, 0.7, False),
        (qwen3_next, 96, 0.7, False),
        (qwen3_next, 256, 1.5, True),
    ],
)
def test_recurrences_that_forget_are_not_blind(make, length, rate, decayed):
    model, name = make(rate)
    inputs = torch.randint(3, 101, (2, length))
    assert is_zero_somewhere(model.eval(), name, inputs) or length == 64
    report = audit(model, CAUSAL, inputs=inputs)
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
    assert ("decayed" in report["by layer"].why) == decayed, str(report)


def test_gradients_that_vanish_in_float64_are_reported():
    report = audit(recurrent(1e-6), CAUSAL, inputs=tokens())
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
    assert "token 0 in layers.0.attention, and" in report["by layer"].why
    assert report["sight"].why.endswith("more pairs, decayed below the range of float64 and not checked")
    assert "decayed below the range of float64" in str(report)


def test_the_picture_is_drawn_in_float64_where_float32_is_too_narrow():
    model, inputs = recurrent(1e-3), tokens()[:, :32]
    assert is_zero_somewhere(model, "layers.0.attention", inputs)
    report = audit(model, CAUSAL, inputs=inputs)
    assert report.findings == ()
    assert "o" not in report.picture()
    assert "o" in audit(recurrent(0.5, hidden=20), CAUSAL, inputs=inputs).picture()


@pytest.mark.ci
@pytest.mark.parametrize("rate, hidden", [(1e-6, LENGTH - 4), (0.5, 0), (0.5, 20)])
def test_a_hidden_token_before_fading_ones_is_reported(rate, hidden):
    report = audit(recurrent(rate, hidden=hidden), CAUSAL, inputs=tokens(), tests=30)
    found = report["by layer"].finding
    assert (found.kind, found.key[1], found.module) == ("blind", hidden, "layers.0.attention"), str(report)
    assert report["sight"].verdict == "broken"


def test_without_float64_it_is_not_answered():
    report = audit(recurrent(0.5, hidden=20, only_float32=True), CAUSAL, inputs=tokens())
    for claim in (report["sight"], report["by layer"]):
        assert claim.verdict == "not answered"
        assert "token 20" in claim.why
        assert claim.why.endswith("checked without float64: NotImplementedError: a kernel for float32 alone")
    decayed = audit(recurrent(1e-5, only_float32=True), CAUSAL, inputs=tokens())
    assert [claim.verdict for claim in decayed.claims] == ["held"] * 3, str(decayed)
    assert (
        "decayed below the range of its dtype, without float64 (NotImplementedError: a kernel" in decayed["sight"].why
    )


def test_functions_of_vectors_are_judged_in_float64_too():
    def softmax(x, allowed):
        scores = (300 * x @ x.mT).masked_fill(~allowed, float("-inf"))
        return scores.softmax(-1) @ x

    allowed = CAUSAL.to_dense(12)[0, 0]
    x = torch.randn(1, 12, 3, generator=torch.Generator().manual_seed(0)) / 2
    hidden = allowed.clone()
    hidden[6:, 5] = False
    assert audit(lambda x: softmax(x, allowed), CAUSAL, inputs=x)["sight"].verdict == "held"
    assert audit(lambda x: softmax(x, hidden), CAUSAL, inputs=x)["sight"].finding.key == (0, 5)


def test_a_layer_may_mix_twice_and_once_near_alone():
    model = small(
        CAUSAL, lambda: {0: Layer(WIDTH, Mixer(WIDTH, CAUSAL), feed=Mixer(WIDTH, masks.Window(1, 0)))}, layers=1
    )
    report = audit(model, CAUSAL, inputs=tokens(), layers=1)
    assert report.ok, str(report)
    both = {0: Layer(WIDTH, Mixer(WIDTH, CAUSAL, hidden=7), feed=Mixer(WIDTH, masks.Window(1, 0)))}
    report = audit(small(CAUSAL, both, layers=1), CAUSAL, inputs=tokens(), layers=1)
    assert report["by layer"].finding.key[1] == 7
    assert report["by layer"].finding.module == "layers.0.attention"
