"""Modules that mix tokens in other ways than attention of one argument: who is accused, and who is not."""

import pytest
import torch
from tests.auditing.small_transformer import Layer, Mixer, small
from torch import nn

import saccade as sc
from saccade import audit, masks
from saccade.auditing.is_attention import attends, reaching_others

WIDTH, CAUSAL = 24, masks.Causal()


def tokens(batch=2, length=24):
    return torch.randint(40, (batch, length), generator=torch.Generator().manual_seed(5))


class Convolution(nn.Module):
    """Each row mixes itself, the two before it and ``ahead`` after it."""

    def __init__(self, ahead=0):
        super().__init__()
        self.ahead, self.conv = ahead, nn.Conv1d(WIDTH, WIDTH, 3 + ahead)

    def forward(self, x):
        return self.conv(nn.functional.pad(x.mT, (2, self.ahead))).mT


class Shift(nn.Module):
    """Half of the channels are those of the token before."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.scale * torch.cat([x[..., : WIDTH // 2], before[..., WIDTH // 2 :]], -1)


class Gated(Convolution):
    """A convolution whose output is gated by another one."""

    def forward(self, x):
        return super().forward(x) * super().forward(x.roll(1, -1)).sigmoid()


class Dilated(Convolution):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 2, dilation=4)

    def forward(self, x):
        return self.conv(nn.functional.pad(x.mT, (4, 0))).mT


NEAR = {"convolution": Convolution, "shift": Shift, "gated": Gated, "dilated": Dilated}


MEASURED = {
    "convolution": "window(2, 0)",
    "shift": "window(1, 0)",
    "gated": "window(2, 0)",
    "dilated": "within window(4, 0)",
}


def beside(mixer, attention=None):
    """A model in whose second layer something else mixes than attention, and after whose first something does."""
    first = Layer(WIDTH, attention or Mixer(WIDTH, CAUSAL), feed=mixer())
    return small(CAUSAL, lambda: {0: first, 1: Layer(WIDTH, mixer())}, layers=3)


@pytest.mark.parametrize("name", NEAR)
def test_other_mixers_may_reach_less(name):
    report = audit(beside(NEAR[name]), CAUSAL, inputs=tokens())
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
    assert report["by layer"].why.endswith("the rule of the whole model: layers.0.feed, layers.1.attention")
    assert {report.reaches[one] for one in ("layers.0.feed", "layers.1.attention")} == {MEASURED[name]}
    assert report.reaches["layers.0.attention"] == report.reaches["layers.2.attention"] == "causal"


def test_other_mixers_may_not_reach_more():
    report = audit(beside(lambda: Convolution(ahead=1)), CAUSAL, inputs=tokens())
    found = report["by layer"].finding
    assert (found.kind, found.row[1] + 1) == ("leak", found.key[1]), str(report)


def test_attention_beside_it_may_not_reach_less():
    blind = Mixer(WIDTH, CAUSAL & masks.Window(3, 0))
    report = audit(beside(Shift, attention=blind), CAUSAL, inputs=tokens())
    assert (report["by layer"].finding.kind, report["by layer"].finding.module) == ("blind", "layers.0.attention")


def test_a_token_that_no_row_takes_in_is_not_near():
    class Deaf(Convolution):
        def forward(self, x):
            return super().forward(x.index_fill(1, torch.tensor(7), 0.0))

    report = audit(beside(Deaf), CAUSAL, inputs=tokens())
    assert (report["by layer"].finding.kind, report["by layer"].finding.key[1]) == ("blind", 7), str(report)


def linear_attention(x):
    return (x @ x.mT).tril() @ x


def hand_written(x):
    return (x @ x.mT).softmax(-1) @ x


ATTENTION = {
    "softmax": hand_written,
    "torch": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    "ours": lambda x: sc.attention(x[:, None], x[:, None], x[:, None])[:, 0],
    "linear": linear_attention,
    "sigmoid": lambda x: (x @ x.mT).sigmoid() @ x,
}
OTHERS = {
    "shift": lambda x: x.roll(1, 1),
    "product with a constant": lambda x: torch.ones(6, 6).tril() @ x,
    "sums": lambda x: x.exp().cumsum(1) * x,
    "softmax of a constant": lambda x: torch.ones(6, 6).softmax(-1) @ x,
    "fourier": lambda x: torch.fft.fft(x, dim=1).real,
}


@pytest.mark.parametrize("name", {**ATTENTION, **OTHERS})
def test_attention_is_detected_by_its_graph(name):
    leaf = torch.randn(2, 6, 4, requires_grad=True)
    assert attends({**ATTENTION, **OTHERS}[name](leaf), leaf) == (name in ATTENTION)


def test_tokens_that_reach_another_row():
    x = torch.randn(1, 11, 3, requires_grad=True)
    for step in (1, 2, 3, 8):
        rows = torch.cat([x[:, :step] * 0, x[:, :-step]], 1) + x
        assert reaching_others(rows, x)[0].tolist() == [place + step < 11 for place in range(11)]


class Encoder(nn.Module):
    """Layers that call torch's attention, each in one of the ways that people write."""

    def __init__(self, call, rule):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))
        self.call, self.rule = call, rule

    def forward(self, x):
        hidden = ~self.rule.to_dense(x.shape[1])[0, 0]
        for layer in self.layers:
            x = x + self.call(layer, x, hidden)
        return x


CALLS = {
    "x, x, x": lambda attention, x, hidden: attention(x, x, x, attn_mask=hidden)[0],
    "by name": lambda attention, x, hidden: attention(query=x, key=x, value=x, attn_mask=hidden)[0],
    "three equal ones": lambda attention, x, hidden: attention(x + 0, x + 0, x + 0, attn_mask=hidden)[0],
    "positions in two": lambda attention, x, hidden: attention(x + 1, x + 1, x, attn_mask=hidden)[0],
}


@pytest.mark.ci
@pytest.mark.parametrize("width, kind", [(4, None), (3, "blind"), (5, "leak")])
@pytest.mark.parametrize("call", CALLS)
def test_all_arguments_that_are_one_tensor_are_replayed_together(call, width, kind):
    torch.manual_seed(0)
    rule = masks.Window(width, 4)
    report = audit(Encoder(CALLS[call], rule).eval(), masks.Window(4, 4), inputs=torch.randn(2, 24, WIDTH))
    found = report["by layer"].finding
    assert (found and found.kind) == kind, str(report)
    assert found is None or found.module.startswith("layers.0")


@pytest.mark.parametrize("width, ok", [(4, True), (3, False), (5, False)])
def test_replaced_modules_are_audited_by_their_rule(width, ok):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    sc.replace_attention(net, mask=masks.Window(width, 4))
    report = audit(net, masks.Window(4, 4), inputs=torch.randn(2, 24, 32))
    assert report.ok == ok, str(report)
    assert ok or report["by layer"].finding.module == "layers.0.self_attn"
