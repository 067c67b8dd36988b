"""The question of a training step, with a tiny model."""

from types import SimpleNamespace

import pytest
import torch
from benchmarks.step_profile import ATTENTION, MATMUL, OPTIMIZER, PYTHON, REST, parts, profiled

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
    shares = {name: share for name, share in row.figures.items() if name.endswith("_share")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert {f"{name}_share" for name in ("norms", "rotary", "gates", "loss", OPTIMIZER, ATTENTION)} <= set(shares)
    assert row.figures["share"] == pytest.approx(1.0 - shares["matmul_share"] - shares["attention_share"])


class _Squares(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def test_every_part_of_a_step_has_time() -> None:
    x = torch.randn(400, 400, requires_grad=True)
    scopes = [(_Squares, "forward", "squares")]
    found = profiled(lambda: _Squares()(x @ x).sum().backward(), scopes, ("none",))
    assert all(found[part] > 0 for part in ("squares", MATMUL, REST))


def _event(number: int, name: str, microseconds: int, parent: object = None, link: int = -1) -> SimpleNamespace:
    return SimpleNamespace(
        id=number,
        name=name,
        cpu_parent=parent,
        time_range=SimpleNamespace(start=number),
        sequence_nr=link,
        scope=0,
        self_cpu_time_total=microseconds,
    )


def test_a_backward_pass_belongs_to_the_part_of_its_forward_pass() -> None:
    mark = _event(0, "part: squares", 1)
    node = _event(3, "autograd::engine::evaluate_function: MulBackward0", 10, link=7)
    other = _event(5, "autograd::engine::evaluate_function: SumBackward0", 100, link=8)
    events = [
        mark,
        _event(1, "aten::mul", 1_000, mark, link=7),
        _event(2, "aten::sum", 10_000, link=8),
        node,
        _event(4, "aten::mul", 100_000, node),
        other,
        _event(6, "aten::expand", 1_000_000, other),
    ]
    found = parts(events, ("none",))
    assert found == pytest.approx({"squares": 0.101, REST: 1.01, PYTHON: 0.000111})
