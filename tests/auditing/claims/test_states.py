"""States that run on from one document to the next, or from one call to the next, are found with their module."""

import pytest
import torch
from tests.auditing import model_zoo as zoo
from tests.auditing.small_transformer import Layer, Mixer, small
from torch import nn

from saccade import audit, masks

WIDTH, LENGTHS = 24, [11, 13]
DOCUMENTS = masks.Documents(LENGTHS, rule=masks.Causal())


def tokens(batch=2, length=24):
    return torch.randint(40, (batch, length), generator=torch.Generator().manual_seed(5))


class Recurrence(nn.Module):
    """A sum that forgets; it starts anew with each text of the given lengths."""

    def __init__(self, lengths=LENGTHS, *, detached=False):
        super().__init__()
        self.lengths, self.detached, self.out = lengths, detached, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.cat([self.read(one) for one in self.out(x).split(self.lengths, 1)], 1)

    def read(self, x):
        state, rows = torch.zeros_like(x[:, 0]), []
        for row in x.unbind(1):
            state = 0.7 * (state.detach() if self.detached else state) + row
            rows.append(state)
        return torch.stack(rows, 1)


class Shift(nn.Module):
    """The token before, of the same text or of any."""

    def __init__(self, *, across):
        super().__init__()
        self.across, self.scale = across, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        if not self.across:
            before = before.index_fill(1, torch.tensor([LENGTHS[0]]), 0.0)
        return self.scale * before


class Remembering(nn.Module):
    """Adds the last row that the call before has ended with."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x):
        out = self.scale * x + self.last
        self.last = x[-1, -1].detach()
        return out


def with_feed(feed):
    torch.manual_seed(0)
    return small(DOCUMENTS, lambda: {1: Layer(WIDTH, Mixer(WIDTH, DOCUMENTS), feed=feed)}, layers=3)


FAULTS = {
    "a recurrence": (lambda: Recurrence([24]), "states"),
    "a recurrence without gradients": (lambda: Recurrence([24], detached=True), "states"),
    "a token shift": (lambda: Shift(across=True), "states"),
    "a buffer": (Remembering, "states between calls"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_state_that_runs_on_is_found_with_its_module_and_pair(name):
    make, claim = FAULTS[name]
    report = audit(with_feed(make()), DOCUMENTS, inputs=tokens(), claims=["states"], tests=3)
    found = report[claim].finding
    assert report[claim].verdict == "broken", str(report)
    assert found.module == "layers.1.feed"
    if claim == "states":
        assert found.row[1] >= LENGTHS[0] > found.key[1]


@pytest.mark.parametrize("feed", [lambda: None, Recurrence, lambda: Shift(across=False)])
def test_states_that_start_anew_are_not_accused(feed):
    report = audit(with_feed(feed()), DOCUMENTS, inputs=tokens(), claims=["states"], tests=3)
    assert report.findings == (), str(report)
    assert report["states"].verdict == report["states between calls"].verdict == "held"


STATES = {
    "Mamba2ForCausalLM": (
        "Mamba2Config",
        {"head_dim": 16, "num_heads": 4, "state_size": 8, "n_groups": 1, "expand": 1},
    ),
    "MambaForCausalLM": ("MambaConfig", {"state_size": 8}),
    "FalconMambaForCausalLM": ("FalconMambaConfig", {"state_size": 8}),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", STATES)
def test_recurrent_models_of_transformers_are_named_by_their_mixers(name):
    config, sizes = STATES[name]
    report = audit(zoo.of(name)(config, **zoo.SIZES, **sizes), masks.Causal(), length=24, claims=["states"], tests=3)
    assert report["reach"].verdict == "held"
    assert report["states"].verdict == "not answered" or report["states"].finding.module.endswith("0.mixer")


@pytest.mark.ci
def test_a_model_that_separates_packed_texts_is_not_accused():
    report = audit(zoo.llama(), length=24, packed=[10, 14], claims=["states"], tests=3)
    assert report["states"].verdict == "held", str(report)
    assert report["states"].why.startswith("documents of 10, 14 tokens, separated by position_ids")
