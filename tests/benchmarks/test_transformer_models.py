"""Whole models, at tiny sizes."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import transformer_models as question
from saccade import masks
from saccade.integrations.transformers import install


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in question.KINDS.items():
        config = kind.model.config_class.from_dict(kind.config.to_dict() | {"sliding_window": 8, "hidden_size": 32})
        monkeypatch.setitem(question.KINDS, name, kind._replace(config=config, n=40))


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", question.KINDS)
def test_both_sides_are_one_model(name: str) -> None:
    its = question.Pair(name)
    question.check(its)
    before = its.models["ours"].lm_head.weight.clone()
    its.step("ours")
    assert not torch.equal(its.models["ours"].lm_head.weight, before)
    assert all(weight.grad is None for weight in its.models["ours"].parameters())


@pytest.mark.usefixtures("_small")
def test_another_mask_is_noticed() -> None:
    its = question.Pair("Mistral")
    its.models["ours"].set_attn_implementation(install("saccade-narrow", mask=masks.Window(3, 0)))
    with pytest.raises(AssertionError, match="not close"):
        question.check(its)
