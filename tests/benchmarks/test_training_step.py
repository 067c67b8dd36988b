"""The question of a training step, with a tiny model."""

import pytest
import torch
from benchmarks.step_profile import ATTENTION, MATMUL, OPTIMIZER, REST, profiled

from benchmarks import training_step as question

SIZES = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "sliding_window": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4}


@pytest.fixture(scope="module")
def its() -> question.Case:
    pytest.importorskip("transformers")
    return question.Case(40, **SIZES)


def test_both_sides_have_one_loss_and_learn(its: question.Case) -> None:
    question.check(its)
    for side, head in (("ours", its.model.head), ("theirs", its.peer.lm_head)):
        before = head.weight.clone()
        its.step(side)
        assert not torch.equal(head.weight, before)
        assert head.weight.grad is None


def test_another_window_is_noticed(its: question.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(its.peer.config, "sliding_window", 3)
    with pytest.raises(AssertionError, match="not close"):
        question.check(its)


def test_shares_of_a_step_sum_to_one(its: question.Case) -> None:
    row = question.parts_row(its)
    parts = {name: share for name, share in row.figures.items() if name.endswith("_share")}
    assert sum(parts.values()) == pytest.approx(1.0)
    assert {f"{name}_share" for name in ("norms", "rotary", "gates", "loss", OPTIMIZER, ATTENTION)} <= set(parts)
    assert row.figures["share"] == pytest.approx(1.0 - parts["matmul_share"] - parts["attention_share"])


class _Squares(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def test_a_backward_pass_belongs_to_the_part_of_its_forward_pass() -> None:
    x = torch.randn(400, 400, requires_grad=True)
    scopes = [(_Squares, "forward", "squares")]
    parts = profiled(lambda: _Squares()(x @ x).sum().backward(), scopes, ("none",))
    without_backward = profiled(lambda: _Squares()(x @ x), scopes, ("none",))
    assert parts["squares"] > 1.5 * without_backward["squares"]
    assert parts[MATMUL] > parts["squares"] > 0
    assert parts[REST] > 0
