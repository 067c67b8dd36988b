"""Whole training set-ups: collators of transformers and of plain loaders, right and with one thing wrong."""

import pytest
import torch
import transformers
from tests.auditing import model_zoo as zoo
from torch.utils.data import DataLoader, default_collate

from saccade import models
from saccade.auditing import audit_setup
from saccade.auditing.collated_batch import SetupBatch


def texts(lengths=(9, 13, 6)):
    draw = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 101, (length,), generator=draw).tolist()} for length in lengths]


def flattened(**options):
    return transformers.DataCollatorWithFlattening(return_tensors="pt", **options)


def padded(side="right", **change):
    """A collator that pads, and the change of one of its results."""

    def collate(features):
        ids = [torch.tensor(one["input_ids"]) for one in features]
        wide = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_side=side)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], True, padding_side=side)
        batch = {"input_ids": wide, "attention_mask": real, "labels": wide.masked_fill(real == 0, -100)}
        if side == "left":
            batch["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
        for name, function in change.items():
            batch[name] = function(batch)
        return {name: one for name, one in batch.items() if one is not None}

    return collate


def changed(**change):
    """The collator of transformers that packs, with other results."""

    def collate(features):
        batch = flattened()(features)
        return batch | {name: function(batch) for name, function in change.items()}

    return collate


RIGHT = {
    "packed": flattened(),
    "packed, told of lengths": flattened(return_flash_attn_kwargs=True, return_seq_idx=True),
    "padded": padded(),
    "padded at the left": padded("left"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_setups_are_not_accused(name):
    torch.manual_seed(0)
    report = audit_setup(zoo.llama(), RIGHT[name], texts(), tests=3)
    assert report.findings == (), str(report)
    held = {claim.name for claim in report.claims if claim.verdict == "held"}
    assert held >= {"collator: texts", "collator: labels", "reach", "texts in the batch = alone", "loss"}
    assert report.rule.startswith("assumed from the configuration: Documents(")


FAULTS = {
    "positions do not restart": (
        changed(position_ids=lambda batch: torch.arange(28)[None]),
        {"collator: positions", "reach", "states", "texts in the batch = alone"},
    ),
    "a mask of ones beside packed texts": (
        changed(attention_mask=lambda batch: torch.ones_like(batch["input_ids"])),
        {"reach", "states", "texts in the batch = alone"},
    ),
    "labels of the first tokens": (
        changed(labels=lambda batch: batch["input_ids"].clone()),
        {"collator: labels"},
    ),
    "labels of padding": (padded(labels=lambda batch: batch["input_ids"].clone()), {"collator: labels"}),
    "labels that are shifted twice": (
        padded(labels=lambda batch: batch["labels"].roll(-1, 1)),
        {"collator: labels"},
    ),
    "padding at the left that is not marked": (
        padded("left", attention_mask=lambda batch: None, position_ids=lambda batch: None),
        {"collator: attention_mask", "reach", "texts in the batch = alone"},
    ),
    "tokens marked as padding": (
        padded(attention_mask=lambda batch: batch["attention_mask"].roll(-1, 1)),
        {"collator: attention_mask"},
    ),
    "a text that is cut": (
        lambda features: padded()([*features[:2], {"input_ids": features[2]["input_ids"][:-1]}]),
        {"collator: texts"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_setup_is_found(name):
    collator, broken = FAULTS[name]
    torch.manual_seed(0)
    report = audit_setup(zoo.llama(), collator, texts(), tests=3)
    found = {claim.name for claim in report.claims if claim.verdict == "broken"}
    assert found >= broken, str(report)


def test_a_model_that_cannot_be_told_of_texts_is_found_in_a_right_collator():
    torch.manual_seed(0)
    report = audit_setup(zoo.gpt_oss(), flattened(), texts(), tests=3)
    assert report["collator: positions"].verdict == "held"
    assert report["states"].finding.module == "model.layers.0.self_attn", str(report)
    assert report["texts in the batch = alone"].verdict == "broken"


def test_a_plain_loader_of_equal_texts():
    ids = [torch.tensor(one["input_ids"]) for one in texts((8, 8))]
    batch = next(iter(DataLoader(ids, batch_size=2)))
    assert torch.equal(batch, torch.stack(ids))
    report = audit_setup(models.small_decoder(), default_collate, ids, claims=["batch"], tests=3)
    assert report.ok, str(report)
    assert report["collator: labels"].verdict == "not answered"


def test_two_texts_of_one_row_without_positions_are_not_told_apart():
    ids = [torch.tensor([4, 5, 6]), torch.tensor([7, 8, 9])]
    claims = {claim.name: claim for claim in SetupBatch(torch.cat(ids)[None], ids).claims()}
    assert claims["collator: positions"].why == "no argument marks where the texts of a packed row begin"
    assert claims["collator: positions"].finding.key == (0, 3)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"texts": ["two words"]}, TypeError, "texts must be token ids.*\nHint: tokenize the texts first"),
        ({"texts": []}, TypeError, "texts must be token ids"),
        ({"collator": lambda features: [1]}, TypeError, "collator must return a mapping of the model's arguments"),
        ({"collator": lambda features: {"labels": 1}}, ValueError, r"collator must return input_ids \[batch, length\]"),
        (
            {"collator": lambda features: torch.ones(1, 9).long()},
            ValueError,
            "collator must keep at least one text unchanged",
        ),
        ({"model": len}, TypeError, "model must be a torch.nn.Module"),
    ],
)
def test_wrong_arguments_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        audit_setup(**{"model": zoo.llama(), "collator": padded(), "texts": texts()} | given)
