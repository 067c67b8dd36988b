"""Tests of the benchmark that judges the choice of a kernel."""

import pytest
import torch
from benchmarks.choice import Choice, Verdict, judged

from benchmarks import choice


def test_every_mask_and_term_is_asked():
    asked = choice.choices(2 * len(choice.MASKS) * len(choice.TERMS))
    assert {one.mask for one in asked} == set(choice.MASKS)
    assert {one.terms for one in asked} == set(choice.TERMS)
    assert asked == choice.choices(2 * len(choice.MASKS) * len(choice.TERMS))  # the same in every run
    assert all(one.is_sensible for one in asked)


@pytest.mark.parametrize("mask", choice.MASKS)
def test_every_mask_runs(mask, monkeypatch):
    monkeypatch.setattr(choice, "_SHORTEST", 0.0)
    verdict = judged(Choice(mask, "ALiBi", 64, torch.float32, "gradient", 16, 1))
    assert verdict.chosen in ("native", "matmul", "fused", "tiled")


@pytest.mark.parametrize("terms", choice.TERMS)
def test_every_term_runs(terms):
    sides = Choice("strided", terms, 64, torch.bfloat16, "dropout", 16, 4).sides()
    chosen, able = sides.kernels()
    assert chosen in able
    assert "reference" not in able
    assert all(x.isfinite().all() for x in sides.run("auto"))


def test_a_single_query_reads_the_last_rows():
    sides = Choice("dense", "bias, trained", 1, torch.float32, "gradient", 16, 4).sides()
    assert sides.mask.shape == (1, choice.DECODED)
    assert sides.trained[0].shape == (1, choice.HEADS, 1, choice.DECODED)
    assert len(sides.run("auto")) == 4


def test_a_slow_choice_is_timed_again_and_the_best_ratio_counts(monkeypatch):
    times = iter([9.0, 1.0, 1.0, 1.2, 1.0, 1.0])
    monkeypatch.setattr(choice, "_ROUNDS", 1)
    monkeypatch.setattr(choice, "_seconds", lambda call, clock: 1.0)
    monkeypatch.setattr(choice, "_mean", lambda call, clock: next(times))
    monkeypatch.setattr(choice.Sides, "kernels", lambda self: ("fused", ["fused", "tiled"]))
    verdict = judged(Choice("full", "plain", 64, torch.float32, "forward", 16, 4))
    assert (verdict.auto, verdict.seconds) == (1.2, 1.0)


def test_rows_say_whether_the_target_is_met():
    one = Choice("full", "plain", 64, torch.float32, "forward", 16, 4)
    assert Verdict("tiled", "native", 2.0, 1.0).row(one).met is False
    assert Verdict("native", "native", 1.4, 1.0).row(one).met is True
    assert "2.00x of native: tiled" in Verdict("tiled", "native", 2.0, 1.0).row(one).measured
