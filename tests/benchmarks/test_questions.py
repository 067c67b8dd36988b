"""The part of every question that comes before timing, at tiny sizes."""

import dataclasses
import sys

import pytest
import torch
from benchmarks.racing import sides

import saccade as sc
from benchmarks import (
    additive,
    bias,
    bigbird,
    bool_mask,
    checking,
    dropout,
    growth,
    linear,
    longformer,
    looking,
    measuring,
    memory,
    packages,
    packed,
    plans,
    plotting,
    selection,
    short,
    stored,
    training_memory,
    window,
)
from saccade import masks


def test_window():
    assert window.memory_of(True, 600)()[0].shape == (1, window.HEADS, 600, window.DIM)


def test_packed():
    its = packed.case(4, 8, 40)
    packed.check(its)
    assert its.packed[0].shape[2] == sum(its.lengths) == its.is_token.sum()


def test_packed_notices_a_document_that_sees_another():
    its = packed.case(4, 8, 40)
    longer = [its.lengths[0] + 1, its.lengths[1] - 1, *its.lengths[2:]]
    with pytest.raises(AssertionError, match="not close"):
        packed.check(its._replace(lengths=longer))


def test_bool_masks():
    tensors, given = bool_mask.case(70)
    for mask in given.values():
        bool_mask.check(tensors, mask)
    assert torch.equal(given["causal"], masks.Causal().to_dense(70)[0, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_stored_weights(causal):
    short.check(stored.Case(*short.case(70, causal, trains=True)))


def test_training_memory():
    training_memory.check(training_memory.Models(n=70, window=8))


def test_training_memory_notices_another_window():
    models = training_memory.Models(n=70, window=8)
    models.own[0].attention.mask = masks.sliding_window(9)
    with pytest.raises(AssertionError, match="not close"):
        training_memory.check(models)


def test_packages_are_asked_what_they_can():
    pytest.importorskip("local_attention")
    pytest.importorskip("x_transformers")
    for its, names in packages.CASES.values():
        small = dataclasses.replace(its, heads=2, n=512, dim=16)
        assert set(sides(small, ["ours", *names]).calls) == {"ours", *names}


def test_selection():
    selection.check(selection.Case(256, 8))
    assert selection.memory_of(True, 256)()[0].shape == (1, 1, 256, selection.DIM)


def test_linear():
    linear.check(linear.Case(n=96))
    assert linear.run_one(70)().shape == (1, 1, 70, 64)


@pytest.mark.parametrize("name", ["published_loop", "package"])
def test_linear_notices_another_sum(name, monkeypatch):
    its = linear.Case(n=96)
    if name == "package":
        pytest.importorskip("performer_pytorch")
        monkeypatch.setattr(linear.package(), "linear_attention", lambda a, b, c: 1.01 * c)
    else:
        monkeypatch.setattr(linear, name, lambda a, b, c: 1.01 * c)
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
    growth.check_dense(700)
    assert growth.dense_memory_of(700)().shape == (1, 1, 700, growth.DIM)


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


@pytest.mark.slow
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
    dense = plotting.Curve(curve.times[:3], curve.extras[:3])  # all pairs may take too long at the last sizes
    figure = plotting.drawn(growth.SIZES, {"one": curve, "SDPA, all pairs": dense})
    assert plotting.png(figure).startswith(b"\x89PNG")


def test_work_that_ours_skips_is_subtracted_from_theirs(monkeypatch):
    layers = longformer.Layers
    monkeypatch.setattr(longformer, "Layers", lambda own_globals: layers(64, 4, own_globals=own_globals))
    monkeypatch.setattr(longformer, "compare", lambda *sides, **options: measuring.Pair(0.01, 0.08, 8.0, 1.0, True))
    monkeypatch.setattr(longformer, "in_turn", lambda *calls, **options: measuring.Rounds([[0.02]], 1.0, True))
    copied, without_wheel, own = longformer.measure(referee=None)
    assert copied.figures["ratio"] == without_wheel.figures["ratio"] == pytest.approx(6.0)
    assert without_wheel.met is True
    assert own.figures["ratio"] == 8.0
