"""The part of every question that comes before timing, at tiny sizes."""

import sys
from types import SimpleNamespace

import pytest
import torch

import saccade as sc
from benchmarks import __main__ as command
from benchmarks import (
    additive,
    bias,
    bigbird,
    checking,
    dropout,
    growth,
    linear,
    longformer,
    looking,
    measuring,
    memory,
    plans,
    plotting,
    reporting,
    short,
    window,
)
from saccade import masks


@pytest.mark.parametrize("dtype", window.TARGETS)
def test_window(dtype):
    window.check(window.case(dtype, n=96, width=8))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_window_of_flex_attention():
    with torch.no_grad():
        made = window.flex(window.case(torch.float32, n=96, width=8), (32, 32), compiled=False)
    assert made.mask_seconds > 0.0


def test_linear():
    linear.check(linear.Case(n=96))
    assert linear.run_one(70)().shape == (1, 1, 70, 64)


def test_linear_notices_another_sum(monkeypatch):
    its = linear.Case(n=96)
    monkeypatch.setattr(linear, "published_loop", lambda a, b, c: 1.01 * c)
    with pytest.raises(AssertionError, match="not close"):
        linear.check(its)


@pytest.mark.parametrize("own_globals", [False, True])
def test_longformer(own_globals):
    longformer.check(longformer.Layers(n=64, width=4, own_globals=own_globals))


def test_longformer_notices_another_width():
    layers = longformer.Layers(n=64, width=4)
    layers.mask = masks.longformer(5, [0])
    with pytest.raises(AssertionError, match="not close"):
        longformer.check(layers)


def test_bigbird():
    ours, theirs = bigbird.check(bigbird.Layers(n=64, block=4))
    assert 0.5 < ours / theirs < 1.5


def test_dropout():
    dropout.check(dropout.case(70))


def test_bias():
    bias.check(bias.case(150))


def test_additive():
    additive.check(additive.case(70))


@pytest.mark.parametrize("question", [dropout, bias, additive], ids=lambda question: question.__name__)
def test_both_sides_are_measured_for_memory(question):
    sides = [name for name in dir(question.Case) if name.startswith(("ours", "theirs"))]
    assert len(sides) in (2, 4, 6)
    for side in sides:
        assert callable(question.memory_of(side, 64))


def test_growth():
    growth.check(700)


def test_statistics():
    looking.check(300)
    assert looking.memory_of(300)() is not None


def test_plans():
    plans.check(700)


def test_a_plan_is_cold():
    made = [plans.cold(plans.MAKERS["window ±256"], 1024) for _ in range(2)]
    assert made[0] is not made[1]


def test_peak_bytes_sees_what_is_gone_at_the_end():
    assert plans.peak_bytes(lambda: sum(bytearray(1_000_000))) >= 1_000_000


@pytest.mark.parametrize("causal", [False, True])
def test_short(causal):
    short.check(short.case(16, causal, trains=True))


def test_rows_by_definition_notice_one_wrong_row():
    tensors = growth.inputs(64)
    out = sc.attention(*tensors, masks.Causal())
    checking.assert_rows_by_definition(out, tensors, masks.Causal())
    out[:, :, -1] += 0.01
    with pytest.raises(AssertionError, match="not close"):
        checking.assert_rows_by_definition(out, tensors, masks.Causal())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_a_call_in_its_own_process():
    jobs = [memory.Job("benchmarks.growth:memory_of", ["window ±256", 4096]) for _ in range(2)]
    result = 4096 * growth.DIM * 4
    assert all(result <= extra < 100 * result for extra in memory.extra_bytes(jobs))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_counts_the_peak_not_what_is_left():
    assert memory.measured(lambda: torch.ones(1 << 24).sum().item()) >= 0.9 * (1 << 26)


def test_a_picture():
    curve = plotting.Curve([1e-3 * n for n in growth.SIZES], [1000 * n for n in growth.SIZES])
    assert plotting.drawn(growth.SIZES, {"one": curve}).startswith(b"\x89PNG")


def test_an_unknown_question_is_one_line(capsys):
    assert command.main(["windows", "short"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    known = ", ".join(command.QUESTIONS)
    assert said.err == f"benchmarks: question must be one of {known}; got windows.\n"


@pytest.mark.parametrize("met, status", [(True, 0), (None, 0), (False, 1)])
def test_the_exit_status_says_whether_all_targets_are_met(met, status, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "Referee", lambda patience: measuring.Referee(lambda: 1.0))
    row = reporting.Row("a case", "1x", "at least 2x", met)
    question = SimpleNamespace(TITLE="a question", measure=lambda referee: iter([row]))
    monkeypatch.setattr(command, "QUESTIONS", {"one": question})
    assert command.main([]) == status
    assert (tmp_path / "out" / "bench" / "results.json").exists()
    said = capsys.readouterr()
    assert "a case" in said.out
    assert "a question" in said.err


def test_what_ours_need_not_compute_is_taken_off_theirs(monkeypatch):
    layers = longformer.Layers
    monkeypatch.setattr(longformer, "Layers", lambda own_globals: layers(64, 4, own_globals=own_globals))
    monkeypatch.setattr(longformer, "compare", lambda *sides, **options: measuring.Pair(0.01, 0.08, 8.0, 1.0, True))
    monkeypatch.setattr(longformer, "in_turn", lambda *calls, **options: measuring.Rounds([[0.02]], 1.0, True))
    copied, own = longformer.measure(referee=None)
    assert copied.figures["ratio"] == pytest.approx(6.0)
    assert copied.met is True
    assert own.figures["ratio"] == 8.0
