"""Models that are right in float32 and wrong under autocast to bfloat16, and models that are right in both."""

import pytest
import torch
from tests.auditing import model_zoo as zoo
from tests.auditing.random_models import draw
from tests.auditing.small_transformer import Layer, small
from torch import nn
from torch.nn import functional as F

from saccade import audit, masks

CAUSAL = masks.Causal()


def is_autocast():
    return torch.is_autocast_enabled("cpu")


def replaced(part, method):
    """Replace the forward of one module by a function of the module, the old forward and the arguments."""
    old = type(part).forward

    class Faulty(type(part)):
        def forward(self, *args, **kwargs):
            return method(self, old, *args, **kwargs)

    part.__class__ = Faulty


def angles_in_bfloat16(model):
    """Compute rotary angles by a product that autocast converts to bfloat16, as many early rotary modules did."""

    def forward(self, old, x, position_ids):
        frequencies = self.inv_freq[None, :, None].expand(len(position_ids), -1, 1)
        angles = (frequencies @ position_ids[:, None].float()).mT.float()
        both = torch.cat([angles, angles], -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    replaced(model.model.rotary_emb, forward)


def mask_in_bfloat16(model):
    """Convert float32's lowest number to bfloat16, which makes it -inf: rows that see nothing become NaN."""

    def forward(self, old, hidden_states, attention_mask=None, **kwargs):
        if attention_mask is not None and is_autocast():
            attention_mask = attention_mask.to(torch.bfloat16)
        return old(self, hidden_states, attention_mask=attention_mask, **kwargs)

    for layer in model.model.layers:
        replaced(layer.self_attn, forward)


def fast_path_without_mask(model):
    """Drop the mask under autocast, in favour of a causal kernel."""

    def forward(self, old, hidden_states, attention_mask=None, **kwargs):
        if attention_mask is not None and is_autocast():
            n = hidden_states.shape[1]
            attention_mask = torch.full((n, attention_mask.shape[-1]), -1e30).triu(attention_mask.shape[-1] - n + 1)
        return old(self, hidden_states, attention_mask=attention_mask, **kwargs)

    replaced(model.model.layers[0].self_attn, forward)


FAULTS = {
    angles_in_bfloat16: {"under autocast: positions shifted"},
    mask_in_bfloat16: {"under autocast: padded at the left"},
    fast_path_without_mask: {"under autocast: padded at the left", "under autocast: packed"},
}


def audited(model, **more):
    return audit(model, length=24, claims=["training"], tests=2, **more)


def broken(report):
    return {claim.name for claim in report.claims if claim.verdict == "broken"}


@pytest.mark.ci
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_bfloat16_is_found_by_the_way_of_running_that_it_changes(fault):
    torch.manual_seed(0)
    model = zoo.llama()
    model.set_attn_implementation("eager")
    for name, own in model.named_parameters():  # initial weights attend nearly evenly, whatever the positions are
        if own.dim() > 1 and "embed" not in name:
            nn.init.xavier_normal_(own)
    fault(model)
    report = audited(model)
    assert broken(report) == FAULTS[fault], str(report)


class Variance(nn.Module):
    """A norm over channels from the mean of squares less the square of the mean, in bfloat16 under autocast."""

    def forward(self, x):
        x = x + 30
        x = x.bfloat16() if is_autocast() else x
        spread = x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
        return ((x - x.mean(-1, keepdim=True)) / (spread.abs() + 1e-3).sqrt()).float()


@pytest.mark.ci
def test_rows_that_bfloat16_makes_meaningless_are_found():
    torch.manual_seed(0)
    model = small(CAUSAL, lambda: {1: nn.Sequential(Variance(), Layer(24, small(CAUSAL).layers[0].attention))})
    report = audit(model, CAUSAL, length=16, claims=["training"], tests=2)
    assert broken(report) == {"autocast = float32"}, str(report)


@pytest.mark.ci
@pytest.mark.parametrize("make", [zoo.llama, zoo.mistral, zoo.gpt2, zoo.gemma3, zoo.decoder])
def test_right_models_hold_in_every_way(make):
    torch.manual_seed(0)
    report = audited(make().eval())
    found = {claim.name: claim.verdict for claim in report.claims if "autocast" in claim.name}
    assert set(found.values()) == {"held"}, str(report)
    assert {"autocast = float32", "under autocast: packed", "under autocast: steps: two halves"} <= found.keys()


class MultiHead(nn.Module):
    """Attention that adds its result, of bfloat16 under autocast, to rows in float32."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(32, 4, batch_first=True), nn.LayerNorm(32)

    def forward(self, x):
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.norm(x + self.attention(x, x, x, attn_mask=future, need_weights=False)[0])


class Functional(nn.Module):
    """A module without submodules, whose products are functions of its parameters."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 32, 32) / 32**0.5)

    def forward(self, x):
        q, k, v = (x @ own for own in self.weights[:3])
        return F.layer_norm(x + F.scaled_dot_product_attention(q, k, v, is_causal=True) @ self.weights[3], (32,))


class First(nn.Module):
    """A recurrence whose rows are the first of its results."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(32, 32, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class Tied(nn.Embedding):
    """A head that is a function of the embeddings."""

    def forward(self, ids):
        x = super().forward(ids)
        return F.linear(x + F.scaled_dot_product_attention(x, x, x, is_causal=True), self.weight)


@pytest.mark.ci
@pytest.mark.parametrize("make", [MultiHead, Functional, First, None])
def test_products_in_bfloat16_whose_results_are_float32_accuse_no_model(make):
    torch.manual_seed(0)
    model = Tied(101, 32) if make is None else nn.Sequential(nn.Embedding(101, 32), make())
    report = audited(model, rule=CAUSAL)
    assert report["autocast = float32"].verdict == "held", str(report)
    assert report["under autocast: one by one = in a batch"].verdict == "held", str(report)
    assert report["autocast = float32"].largest > 0


@pytest.mark.parametrize("is_leaky", [False, True])
def test_models_of_vectors_run_under_autocast(is_leaky):
    class Model(MultiHead):
        def forward(self, x):
            rows = super().forward(x)
            return rows + rows.mean(1, keepdim=True) if is_leaky and is_autocast() else rows

    torch.manual_seed(0)
    report = audited(Model(), rule=CAUSAL, inputs=torch.randn(2, 24, 32))
    assert report["training"].verdict == "not answered"
    assert broken(report) == ({"under autocast", "autocast = float32"} if is_leaky else set()), str(report)
    assert {"under autocast", "autocast = float32"} <= {claim.name for claim in report.claims}


class Refusing(Tied):
    """A model that doubles its rows in training, and cannot run under autocast."""

    def forward(self, ids):
        if is_autocast():
            raise RuntimeError("no kernel for bfloat16")
        return super().forward(ids) * (2 if self.training else 1)


def test_a_model_that_cannot_run_under_autocast_has_its_other_claims_answered():
    report = audited(Refusing(101, 32), rule=CAUSAL)
    assert broken(report) == {"in training, without dropout"}, str(report)
    assert report["training"].why == "RuntimeError: no kernel for bfloat16"


def test_a_router_that_bfloat16_flips_accuses_no_model():
    drawn = draw(48)  # one row of this model changes its expert, by three times the effect of one rounding
    report = audit(drawn.model, drawn.rule, inputs=drawn.inputs, claims=["training"], tests=1, seed=48)
    assert report["autocast = float32"].verdict == "held"
