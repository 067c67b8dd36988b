"""Losses that read labels of padding or of a next document, other labels than the next token's, or a wrong mean."""

from types import SimpleNamespace

import pytest
import torch
from tests.auditing import model_zoo as zoo
from tests.auditing.small_transformer import Small
from torch import nn
from torch.nn import functional as F

from saccade import audit, masks
from saccade.auditing import claims

CAUSAL = masks.Causal()


class LM(nn.Module):
    """A language model that computes its loss in one of several ways."""

    def __init__(self, fault=""):
        super().__init__()
        torch.manual_seed(0)
        self.fault, self.body, self.head = fault, Small([CAUSAL], vocab=40), nn.Linear(11, 40)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.body(input_ids))
        return SimpleNamespace(logits=logits, loss=None if labels is None else self.loss(logits, labels, input_ids))

    def loss(self, logits, labels, ids):
        if self.fault == "labels of padding":
            labels = ids
        by = {"no shift": 0, "two shifts": 2}.get(self.fault, 1)
        rows, labels = logits[:, : logits.shape[1] - by].flatten(0, 1), labels[:, by:].flatten()
        if self.fault == "padding is class 0":
            labels = labels.clamp(min=0)
        total = F.cross_entropy(rows, labels, reduction="sum")
        count = labels.numel() if self.fault == "a mean over padding" else (labels != -100).sum()
        return total / count


FAULTS = {
    "labels of padding": "leak",
    "padding is class 0": "leak",
    "no shift": "leak",
    "two shifts": "leak",
    "a mean over padding": "blind",
}


def tokens():
    return torch.randint(40, (2, 18), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_loss_is_found_with_its_label(fault):
    claim = audit(LM(fault), CAUSAL, inputs=tokens(), claims=["loss"], tests=2)["loss"]
    assert claim.verdict == "broken"
    assert claim.finding.kind == FAULTS[fault]
    assert claim.finding.key[1] == claim.finding.row[1] + 1
    assert "the loss at output" in claim.finding.pair


@pytest.mark.ci
def test_right_losses_are_not_accused():
    assert audit(LM(), CAUSAL, inputs=tokens(), claims=["loss"], tests=2)["loss"].verdict == "held"
    for model in (zoo.llama(), zoo.gpt_oss()):
        report = audit(model, length=18, claims=["loss"], tests=2)
        assert report["loss"].verdict == "held", str(report)


def test_labels_of_the_inputs_are_taken():
    ids = tokens()
    labels = ids.clone()
    labels[:, :9] = -100
    assert (
        audit(LM(), CAUSAL, inputs={"input_ids": ids, "labels": labels}, claims=["loss"], tests=2)["loss"].verdict
        == "held"
    )


def test_a_model_without_labels_has_no_loss():
    claim = audit(Small([CAUSAL]), CAUSAL, inputs=tokens(), claims=["loss"], tests=2)["loss"]
    assert (claim.verdict, claim.why) == ("not answered", "the model takes no labels")


def test_claims_have_names():
    assert claims.checked_names(["loss", "states"]) == ("states", "loss")
    assert claims.checked_names(["all"]) == tuple(claims.CLAIMS)
    with pytest.raises(ValueError, match=r"claims must be among states, .*, all; got 'losses'"):
        audit(LM(), CAUSAL, inputs=tokens(), claims=["losses"])
