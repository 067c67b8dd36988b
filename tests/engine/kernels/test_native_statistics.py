"""The compiled sweep gives the statistics of the dense matrix at every level; where it cannot run, blocks do."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.kernels.native_levels import needs_native, rounding
from torch import Tensor

import saccade as sc
from saccade import masks, statistics
from saccade.positions import ALiBi
from saccade.statistics import Statistic

pytestmark = needs_native
ROOT = Path(__file__).parents[3]


def questions(*, with_distributions: bool = True) -> dict[str, Statistic]:
    asked: dict[str, Statistic] = {
        "largest": statistics.LargestWeight(),
        "squares": statistics.SquaredNorm(),
        "logit": statistics.LargestLogit(),
        "first": statistics.SinkMass(3),
        "before": statistics.LagMass(1),
        "ahead": statistics.LagMass(-2),
        "local": statistics.LocalMass(70),
        "received": statistics.Received(),
    }
    if with_distributions:
        asked |= {
            "entropy": statistics.Entropy(),
            "variance": statistics.LogitVariance(),
            "distance": statistics.Distance(),
            "information": statistics.PositionInformation(),
        }
    return asked


def truth(scores: Tensor, sink: Tensor | None = None) -> dict[str, Tensor]:
    """Return the answers by definition from float64 scores, which are -inf where a key is hidden."""
    q_len, kv_len = scores.shape[2:]
    more = (
        scores.new_full(scores.shape[:3], -math.inf) if sink is None else sink[None, :, None].expand(scores.shape[:3])
    )
    p = torch.cat([scores, more[..., None]], -1).softmax(-1)[..., :-1].nan_to_num()
    p = p.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    logs = torch.where(p > 0, p.clamp_min(1e-300).log(), 0.0)
    kv = torch.arange(kv_len)
    lags = torch.arange(kv_len - q_len, kv_len)[:, None] - kv
    entropy, count = -(p * logs).sum(-1), (p.sum(-1) > 0).sum(-1).clamp_min(1)
    return {
        "largest": p.amax(-1),
        "squares": (p * p).sum(-1),
        "logit": scores.amax(-1),
        "first": (p * (kv < 3)).sum(-1),
        "before": (p * (lags == 1)).sum(-1),
        "ahead": (p * (lags == -2)).sum(-1),
        "local": (p * (lags.abs() <= 70)).sum(-1),
        "received": p.sum(2),
        "entropy": entropy,
        "variance": (p * (logs + entropy[..., None]) ** 2).sum(-1),
        "distance": (p * lags.abs()).sum(-1),
        "information": torch.special.entr(p.sum(2) / count[..., None]).sum(-1) - entropy.sum(-1) / count,
    }


def cases() -> Iterator[tuple[str, sc.AttentionMatrix, Tensor, Tensor | None]]:
    """Yield matrices, their float64 scores and their sinks: every kind of plan, term and length, sharp and flat."""
    holes = torch.rand(2, 4, 130, 200) < 0.2
    holes[1, 2, 50:80] = False
    rules = [None, masks.Causal(), masks.Window(20, 3), masks.longformer(16, [0, 5]), masks.Strided(3)]
    rules = [*rules, masks.Causal() & masks.Padding([60, 0]), masks.Predicate(lambda b, h, q, kv: q * 7 % 5 != kv % 5)]
    sizes = [(130, 130), (70, 200), (1, 300), (100, 64), (30, 1300)]
    everything: list[tuple[Any, tuple[int, int], dict[str, Any]]] = [
        (rule, size, {}) for rule in rules for size in sizes
    ]
    everything += [(holes, (130, 200), {}), (None, (50, 50), {"softcap": 3.0}), (None, (90, 90), {"bias": ALiBi(4)})]
    hidden = torch.randn(2, 1, 70, 70).masked_fill(torch.rand(2, 1, 70, 70) < 0.5, -math.inf)
    sink = torch.tensor([0.5, -3.0, 60.0, 2.0])
    everything += [(masks.Causal(), (70, 70), {"bias": hidden}), (masks.Window(9, 0), (70, 70), {"sink_logit": sink})]
    everything += [(masks.Causal(), (70, 70), {"sink_logit": sink, "softcap": 9.0, "bias": ALiBi(4), "scale": 0.7})]
    for rule, (q_len, kv_len), options in everything:
        for sharpness in (1.0, 12.0):
            q, k = sharpness * torch.randn(2, 4, q_len, 33), torch.randn(2, 2, kv_len, 33)
            matrix = sc.AttentionMatrix(q, k, rule, impl="native", **options)
            yield (
                f"{rule} {q_len} {kv_len} {list(options)} {sharpness}",
                matrix,
                scores_of(matrix, q, k, options),
                options.get("sink_logit"),
            )


def scores_of(matrix: sc.AttentionMatrix, q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the scores in float64, pair by pair, with biases by definition."""
    q_len, kv_len = matrix.shape[2:]
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * options.get("scale", q.shape[3] ** -0.5)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    bias = options.get("bias")
    if isinstance(bias, ALiBi):
        lags = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
        bias = -lags.abs() * torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
    scores = scores if bias is None else scores + bias.double()
    seen = matrix.mask.to_dense(q_len, kv_len, batch=2, heads=4)
    return scores.masked_fill(~seen, -math.inf)


def check_all() -> int:
    """Check every case against the definition, and return the number of cases."""
    torch.manual_seed(0)
    count = 0
    for name, matrix, scores, sink in cases():
        asked = questions(with_distributions=sink is None)
        expected = truth(scores, None if sink is None else sink.double())
        for (question, _), answer in zip(asked.items(), matrix.compute(*asked.values()), strict=True):
            note = f"{question} of {name}"
            torch.testing.assert_close(
                answer, expected[question].float(), rtol=1e-4, atol=2e-5, msg=lambda m, note=note: f"{note}: {m}"
            )
        count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_every_level_finds_what_the_definitions_say(level: int) -> None:
    """Every level gives the definition's statistics, in its own process, since the processor is checked only once."""
    code = "from tests.engine.kernels.test_native_statistics import check_all; print(check_all())"
    env = os.environ | {"SACCADE_CPU_LEVEL": str(level)}
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) > 70


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(dtype: torch.dtype) -> None:
    q, k = torch.randn(1, 4, 200, 48).to(dtype), torch.randn(1, 2, 200, 48).to(dtype)
    asked = questions()
    found = sc.AttentionMatrix(q, k, masks.Causal(), impl="native").compute(*asked.values())
    scores = scores_of(sc.AttentionMatrix(q, k.repeat(1, 1, 1, 1), masks.Causal()), q, k, {})
    expected = truth(scores[:1])
    for name, answer in zip(asked, found, strict=True):
        assert answer.dtype == torch.float32
        torch.testing.assert_close(answer, expected[name].float(), rtol=1e-4, atol=2e-5)


def test_rows_near_a_single_key_keep_their_entropy() -> None:
    """The entropy is exact for one key that is up to 89 nats above 999 others."""
    gaps = torch.arange(0.0, 90.0)
    q, k = gaps[None, None, :, None], torch.zeros(1, 1, 1000, 1)
    k[0, 0, 77] = 1.0
    matrix = sc.AttentionMatrix(q, k, scale=1.0, impl="native")
    entropy, variance = matrix.compute(statistics.Entropy(), statistics.LogitVariance())
    expected = truth((q @ k.mT).double())
    rtol = rounding(1000)
    torch.testing.assert_close(entropy.double(), expected["entropy"], rtol=rtol, atol=1e-6)
    torch.testing.assert_close(variance.double(), expected["variance"], rtol=3 * rtol, atol=1e-6)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    q, k = torch.randn(1, 2, 700, 32), torch.randn(1, 1, 700, 32)
    matrix = sc.AttentionMatrix(q, k, masks.Window(300, 10), impl="native")
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(matrix.compute(*questions().values()))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


class NoBlocks(sc.AttentionMatrix):
    def blocks(self, *part: object) -> Iterator[Any]:
        raise AssertionError("asked for blocks")


def test_blocks_are_made_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 1, 50, 8)
    assert NoBlocks(x, x, masks.Causal(), impl="native").summary().named("entropy").values.isfinite().all()
    kept = questions()
    for told in ({"impl": "tiled"}, {"impl": "native", "mask": lambda b, h, q, kv: q >= kv}, {"dtype": torch.float64}):
        dtype = told.pop("dtype", torch.float32)
        with pytest.raises(AssertionError, match="asked for blocks"):
            NoBlocks(x.to(dtype), x.to(dtype), **told).compute(*kept.values())
    for is_on in (False, True):
        monkeypatch.setattr("saccade.engine.kernels.native_statistics.is_on", lambda is_on=is_on: is_on)
        if is_on:
            assert NoBlocks(x, x).entropy().isfinite().all()
        else:
            with pytest.raises(AssertionError, match="asked for blocks"):
                NoBlocks(x, x).entropy()


def test_answers_stand_in_the_order_of_their_questions() -> None:
    """Answers come in the order of the questions, also if only blocks answer some, or tokens have other positions."""
    q, k = torch.randn(2, 2, 60, 8), torch.randn(2, 2, 60, 8)
    elsewhere = (torch.arange(100, 160)[None], torch.arange(60)[None])
    table = (torch.arange(60).expand(2, 60) * torch.tensor([[1], [3]]), torch.arange(60)[None])
    asked = [statistics.TopK(2), statistics.Distance(), statistics.Distance(elsewhere), statistics.Received()]
    asked += [statistics.LagMass(102, elsewhere), statistics.Distance(table), statistics.LocalMass(2, table)]
    asked += [statistics.Entropy(), statistics.Coverage((0.5,)), statistics.Entropy()]
    one, other = (sc.AttentionMatrix(q, k, masks.Causal(), impl=impl).compute(*asked) for impl in ("native", "tiled"))
    assert torch.equal(one[0].indices, other[0].indices)
    for own, right in zip(one[1:], other[1:], strict=True):
        torch.testing.assert_close(own, right)
    one[-1].zero_()
    assert one[7].any()  # who changes an answer changes no other


def test_nonfinite_inputs_are_left_to_blocks() -> None:
    q, k = torch.randn(1, 1, 60, 8), torch.randn(1, 1, 60, 8)
    q[0, 0, 20], k[0, 0, 40] = math.nan, math.inf
    one, other = (sc.AttentionMatrix(q, k, masks.Causal(), impl=impl).summary() for impl in ("native", "tiled"))
    for name, row in one.rows.items():
        assert torch.equal(row.isnan(), other.rows[name].isnan())
        assert row[..., :20].isfinite().all()
        assert row[..., 20].isnan().all() or name in ("effective_tokens",)
