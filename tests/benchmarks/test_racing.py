"""Problems, who computes them, and what is said of their times."""

import dataclasses
import itertools

import pytest
import torch
from benchmarks.compare import rows, title
from benchmarks.measuring import Referee, Rounds
from benchmarks.problem import Problem

import saccade as sc
from benchmarks import conditions, racing, sides
from saccade.engine.kernels import native
from saccade.masks import Causal, Coarse, Window

PACKAGES = {"local-attention": "local_attention", "x-transformers": "x_transformers"}
MASKS = (None, Causal(), Window(16, 16), Window(16, 0), Coarse(Window(1, 1), 16))
NEAR = Problem(Window(16, 16), 1, 2, 64, 16)


def quiet(rounds=1):
    return Referee(lambda: 1.0, samples=1, most_rounds=rounds)


@pytest.mark.parametrize("name", [name for name in sides.SIDES if name not in ("flex", "native")])
def test_each_side_computes_the_problem_or_is_left_out(name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    found = 0
    for mask, grouped, backward in itertools.product(MASKS, (None, 1), (False, True)):
        its = Problem(mask, 1, 2, 64, 16, kv_heads=grouped, dropout_p=0.1, backward=backward)
        ready = racing.sides(its, ["reference", name])
        assert (name in ready.calls) != (name in ready.left_out)
        found += name in ready.calls
    assert found >= 4


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", MASKS)
def test_flex_attention(mask):
    its = Problem(mask, 1, 2, 64, 16, kv_heads=1)
    side = sides.flex_with(its, (32, 32), compiled=False)
    torch.testing.assert_close(side.forward(0.0), sides.ours(its).forward(0.0), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("change, why", [({"backward": True}, "no backward"), ({"dropout_p": 0.1}, "no dropout")])
def test_flex_attention_says_what_it_has_not(change, why):
    assert why in racing.sides(dataclasses.replace(NEAR, **change), ["ours", "flex"]).left_out["flex"]


def test_another_result_is_noticed(monkeypatch):
    other = sides.Side(lambda p: sc.attention(*NEAR.tensors, Window(15, 16)))
    monkeypatch.setitem(sides.SIDES, "other", lambda its: other)
    with pytest.raises(AssertionError, match="not close"):
        racing.sides(NEAR, ["ours", "other"])


def test_a_missing_package_is_left_out(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.peer.import_module", lambda name: __import__("no_such_package"))
    turns = racing.sides(NEAR, ["ours", "local-attention"]).race(quiet(), 1)
    row = turns.row("a case", "ours", "local-attention", 2.0)
    assert row.met is None
    assert "pip install 'saccade-attention[bench]'" in row.measured


def test_pairs_and_products_are_counted():
    assert Problem(None, 2, 3, 10, 4).pairs == Problem(None, 2, 3, 10, 4).dense_pairs == 600
    causal = Problem(Causal(), 1, 1, 10, 4)
    assert causal.pairs == causal.dense_pairs == 55
    near = Problem(Window(1, 0), 1, 1, 10, 4)
    assert (near.pairs, near.dense_pairs) == (19, 100)
    assert near.flops == 19 * 4 * 4
    assert dataclasses.replace(near, backward=True).flops == 19 * 4 * 14


def turns_of(times, names=("ours", "sdpa", "flex"), **left_out):
    ready = racing.Sides(NEAR, {}, dict.fromkeys(names, ""), left_out, 1)
    return racing.Turns(ready, list(names), Rounds(times, 1.0, True))


def test_rows_of_a_race(monkeypatch):
    monkeypatch.setattr(racing, "matmul_peak", lambda dtype, number: 1e6)
    turns = turns_of([[1.0, 2.0, 3.0], [1.0, 2.0, 5.0], [2.0, 4.0, 8.0]])
    assert turns.row("a case", "ours", "flex", 4.0, "").figures["ratio"] == 4.0
    assert turns.row("a case", "ours", "flex", 4.0, "").met is True
    share = turns.share_row("a case", "ours", 0.9, "")
    assert share.figures["dense_share"] == pytest.approx(2.0 * NEAR.pairs / NEAR.dense_pairs)
    assert share.figures["peak_share"] == pytest.approx(NEAR.flops / 1e6)
    assert share.met is False


@pytest.mark.parametrize(("half", "peak"), [(0.1, 8.0), (7.0, 7.0), (20.0, 20.0)])
def test_half_precision_that_a_processor_lacks_is_compared_with_float32(monkeypatch, half, peak):
    rates = {torch.float32: 8.0, torch.float16: half}
    monkeypatch.setattr(racing, "matmul_rate", lambda dtype=torch.float32: rates[dtype])
    assert racing.matmul_peak.__wrapped__(torch.float16, 1) == peak


def test_a_target_that_is_not_for_this_machine_says_why():
    row = turns_of([[1.0, 2.0, 3.0]]).row("a case", "ours", "flex", 4.0, "no AMX")
    assert (row.met, row.target) == (None, "at least 4x; not asked: no AMX")


def test_conditions_that_a_machine_lacks(monkeypatch):
    monkeypatch.setattr(native, "is_on", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert (conditions.lacking(), conditions.lacking(torch.bfloat16)) == ("", "no AMX")
    with conditions.no_wheel():
        assert conditions.lacking() == "without saccade-cpu"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert conditions.lacking() == "no AVX-512"


@pytest.mark.native
def test_without_the_wheel_another_kernel_runs(monkeypatch):
    monkeypatch.setattr(native, "is_on", lambda: True)
    query, key, _ = NEAR.tensors
    assert sc.AttentionMatrix(query, key, NEAR.mask).explain().kernel == "native"
    with conditions.no_wheel():
        assert sc.AttentionMatrix(query, key, NEAR.mask).explain().kernel == "fused"


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with conditions.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    assert conditions.thread_counts()[0] == 1


def test_others_are_busy_and_then_gone(monkeypatch):
    started = []
    popen = conditions.subprocess.Popen
    monkeypatch.setattr(conditions.subprocess, "Popen", lambda *args: started.append(popen(*args)) or started[-1])
    with conditions.busy(2):
        assert [other.poll() for other in started] == [None, None]
    assert all(other.poll() is not None for other in started)


def test_a_comparison_of_ones_own():
    its = Problem(Window(16, 16), 1, 4, 64, 16, kv_heads=2, dropout_p=0.1, backward=True)
    found = list(rows(its, ["sdpa", "sdpa+mask", "flex", "tiled"], quiet(), 1, is_busy=True))
    cases = [row.case for row in found]
    assert cases[:3] == ["ours", "tiled", "against sdpa"]
    assert cases[len(cases) // 2] == "ours, beside a busy process"
    assert "4, 64, 16] on 2 heads of keys, float32, dropout 0.1, forward + backward" in title(its)
