"""Masks as text: the matrix, of the batch item and the head that is asked for."""

import pytest
import torch

from saccade import masks

ITEMS = masks.PerItem([masks.Causal(), masks.Window(0, 1), masks.Full()])
HEADS = masks.Blocks(torch.tensor([[[True, False], [True, True]], [[False, True], [True, False]]]), 2)


def _text(mask: masks.Mask, batch: int, head: int, q_len: int, kv_len: int) -> str:
    rows = mask.to_dense(q_len, kv_len, batch=batch + 1 if mask.shape[0] == 1 else None, heads=2)[batch, head]
    return "\n".join(" ".join(".1"[seen] for seen in row) for row in rows.int().tolist())


@pytest.mark.parametrize("mask", [ITEMS, HEADS & masks.Padding([3, 4, 1]), masks.Causal(), HEADS], ids=str)
@pytest.mark.parametrize("batch, head", [(0, 0), (1, 0), (0, 1), (2, 1)])
def test_a_picture_is_the_matrix(mask: masks.Mask, batch: int, head: int) -> None:
    assert mask.picture(4, batch=batch, head=head) == _text(mask, batch, head, 4, 4)
    assert mask.picture(3, 4, batch=batch, head=head) == _text(mask, batch, head, 3, 4)
    if (batch, head) == (0, 0):
        assert mask.picture(4) == _text(mask, 0, 0, 4, 4)


def test_a_picture_has_eight_rows_by_default() -> None:
    assert masks.Causal().picture() == masks.Causal().picture(8)


def test_a_missing_item_has_no_picture() -> None:
    for options, name in (({"batch": 3}, "batch"), ({"head": 2}, "head")):
        with pytest.raises(ValueError, match=rf"(PerItem|Blocks|Padding)\.picture: {name} must be below"):
            (ITEMS if name == "batch" else HEADS).picture(4, **options)
    for sizes in ((129,), (4, 129), (129, 4)):
        with pytest.raises(ValueError, match=r"Causal\.picture: q_len and kv_len must be 0 to 128"):
            masks.Causal().picture(*sizes)
    assert masks.Causal().picture(128).count("\n") == 127
