"""The comparison: its numbers against their definitions, its times against a clock that is told."""

import dataclasses
import itertools
import math
import re

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade.caches import Int8Cache, KVCache, QuantizedCache, RecurrentCache
from saccade.masks import Causal, Documents, Mask, Padding, Window
from saccade.mechanisms import Linear, Linformer, Mechanism, Nystrom, Performer, Softmax, comparison_contenders
from saccade.mechanisms import comparison as module
from saccade.mechanisms.comparison import Compared, compare, crossing


@dataclasses.dataclass(frozen=True)
class FirstTokens(Mask):
    """A user's own mask that holds for the texts of one batch."""

    count: int
    is_fact_of_batch = True
    hides_keys_only = True

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv < self.count


def _inputs(n: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, n, 8) / 2, torch.randn(2, 2, n, 8) / 2, torch.randn(2, 2, n, 5)


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Padding([48, 20])], ids=str)
def test_errors_are_those_of_the_definition(mask: sc.masks.Mask | None) -> None:
    q, k, v = _inputs()
    row = compare(q, k, v, [Performer(64)], mask=mask).rows[0]
    exact, own = (mechanism(q, k, mask=mask) for mechanism in (Softmax(), Performer(64)))
    errors = (own @ v - exact @ v).norm(dim=-1) / (exact @ v).norm(dim=-1)
    assert row.error_median == pytest.approx(errors.median().item(), rel=1e-4)
    assert row.error_worst == pytest.approx(errors.max().item(), rel=1e-4)
    distances = (own.to_dense() - exact.to_dense()).abs().sum(-1).flatten() / 2
    picked = distances[torch.linspace(0, distances.numel() - 1, 64).round().long()]
    assert row.distance_median == pytest.approx(picked.median().item(), rel=1e-4)
    assert row.distance_worst == pytest.approx(picked.max().item(), rel=1e-4)


def test_softmax_itself_is_no_error_away() -> None:
    row = compare(*_inputs(), [Softmax()]).rows[0]
    assert (row.error_worst, row.distance_worst) == (0.0, 0.0)
    assert row.verdict == "close to exact attention"


def test_rows_that_see_nothing_are_left_out() -> None:
    q, k, v = _inputs()
    row = compare(q, k, v, [Performer(64)], mask=Padding([48, 0])).rows[0]
    assert math.isfinite(row.error_worst)
    nothing = compare(q, k, v, [Performer(64)], mask=Padding([0, 0])).rows[0]
    assert math.isnan(nothing.error_median)
    assert nothing.verdict.startswith("nothing to compare")


@pytest.mark.parametrize(
    "error, verdict",
    [(0.0, "close"), (0.01, "close"), (0.011, "rough"), (0.1, "rough"), (0.101, "too far off"), (3.0, "too far off")],
)
def test_verdicts_follow_from_the_median_error(error: float, verdict: str) -> None:
    assert Compared("x", error_median=error).verdict.startswith(verdict)


@pytest.mark.parametrize(
    "ratios, length",
    [
        ({128: 0.5, 256: 0.5}, None),
        ({128: 2.0, 256: 0.9}, None),
        ({128: 2.0, 256: 3.0}, 128),
        ({128: 0.5, 512: 2.0}, 256),
        ({128: 0.25, 512: 4.0}, 256),
        ({64: 5.0, 128: 0.5, 512: 2.0, 1024: 4.0}, 256),
        ({128: 0.5, 256: 1.0}, 256),
        ({}, None),
    ],
)
def test_the_length_at_which_the_ratio_is_one(ratios: dict[int, float], length: int | None) -> None:
    assert crossing(ratios) == length


def _seconds_told(monkeypatch: pytest.MonkeyPatch, slow: float = 0.0) -> list[int]:
    """Exact attention takes n² units, others 1000 n; notes the lengths asked for."""
    asked: list[int] = []

    def seconds(mechanism: Mechanism, case: module.Case, *, is_actual_length: bool) -> float:
        n = case.key.shape[2]
        if isinstance(mechanism, Softmax):
            asked.append(n)
            return (n * n + slow) * 1e-6
        return 1e-3 * n if not isinstance(mechanism, Linformer) or n <= mechanism.kv_len else math.nan

    monkeypatch.setattr(module, "_seconds", seconds)
    return asked


def test_from_which_length_on_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _seconds_told(monkeypatch)
    q, k, v = _inputs(400)
    result = compare(q, k, v, [Linear(), Linformer(400, 8)])
    assert sorted(set(asked)) == [50, 100, 200, 400, 800, 1600]
    assert result.lengths == (50, 100, 200, 400, 800, 1600)
    assert result.rows[0].faster_from == pytest.approx(1000, rel=0.01)
    assert (result.rows[1].faster_from, result.rows[1].timed_to) == (None, 400)
    assert result.exact_seconds == pytest.approx(0.16)
    assert result.rows[0].seconds == pytest.approx(0.4)
    assert "never up to 400" in str(result)
    assert "1000" in str(result)


def test_lengths_beyond_the_facts_of_a_batch_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _seconds_told(monkeypatch)
    q, k, v = _inputs(40)
    for mask in (Causal() & Padding([40, 20]), Documents([20, 20], rule=Causal())):
        asked.clear()
        compare(q, k, v, [Linear()], mask=mask)
        assert sorted(set(asked)) == [5, 10, 20, 40]
    asked.clear()
    compare(q, k, v, [Softmax()], mask=Causal() & ~Window(2, 0))
    assert sorted(set(asked)) == [5, 10, 20, 40, 80, 160]
    asked.clear()
    compare(q, k, v, [Softmax()], mask=torch.ones(40, 40, dtype=torch.bool))
    assert sorted(set(asked)) == [40]
    asked.clear()
    compare(q, k, v, [Softmax()], mask=FirstTokens(30) | Causal())
    assert sorted(set(asked)) == [5, 10, 20, 40]
    asked.clear()
    compare(q, k, v, [Linear()], timed_lengths=[8, 64])
    assert sorted(set(asked)) == [8, 40, 64]


def test_it_does_not_wait_for_long_products(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _seconds_told(monkeypatch, slow=2e6)
    compare(*_inputs(40), [Linear()])
    assert sorted(set(asked)) == [5, 10, 20, 40]


def test_a_mask_that_cannot_be_had_is_a_row_that_says_why() -> None:
    result = compare(*_inputs(), [Nystrom(4), Linear(), Linformer(48, 4)], mask=Causal())
    assert result.rows[0].verdict.startswith("refused: Causal lets queries see different keys")
    assert result.rows[2].reasons
    assert math.isnan(result.rows[0].error_median)
    assert math.isfinite(result.rows[1].error_median)
    lines = str(result).splitlines()
    assert lines[4].split() == ["Nystrom", *["-"] * 7]
    assert lines[-1].startswith("Linformer: refused")


def test_memory_counts_what_is_held_at_a_time() -> None:
    def call() -> Tensor:
        x = torch.zeros(1000)  # 4000 bytes
        x = x + 1  # both are held for a moment
        return x[:10] + 1  # and the second one with 40 bytes

    assert module._peak_bytes(call, torch.device("cpu")) == 8000
    given = torch.zeros(1000)
    assert module._peak_bytes(lambda: given.add_(1).view(10, 100), torch.device("cpu")) == 0
    result = compare(*_inputs(256), [Performer(64)])
    assert not result.is_measured
    features = 2 * (4 + 2) * 256 * 64 * 4
    assert features < result.rows[0].memory_bytes < 4 * features


def test_names_tell_mechanisms_apart() -> None:
    assert [row.name for row in compare(*_inputs(), [Linear(), Performer(8), Performer(16)]).rows] == [
        "Linear",
        "Performer(8)",
        "Performer(16)",
    ]
    same = [Performer(8), Performer(8, seed=1)]
    names = [row.name for row in compare(*_inputs(), same).rows]
    assert len(set(names)) == 2
    assert "seed=1" in names[1]


def test_queries_of_another_length_are_timed_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _inputs(40)
    case = module.Case(q[:, :, :10], k, v, None)
    assert [x.shape[2] for x in case.at(80)[:3]] == [20, 80, 80]
    assert [x.shape[2] for x in case.at(2)[:3]] == [1, 2, 2]
    torch.testing.assert_close(case.at(80).key[:, :, 40:], k)
    assert case.at(40) is case


def test_wrong_arguments_are_refused() -> None:
    q, k, v = _inputs()
    with pytest.raises(TypeError, match=r"compare: mechanisms must be a list of mechanisms and masks; got Linear"):
        compare(q, k, v, Linear())
    with pytest.raises(TypeError, match=r"compare: mechanisms must be a list of mechanisms"):
        compare(q, k, v, [Linear])
    with pytest.raises(ValueError, match="value must have shape"):
        compare(q, k, v[:, :, :3], [Linear()])
    with pytest.raises(ValueError, match="compare: tensors must contain at least one query and one key"):
        compare(q[:, :, :0], k, v, [Linear()])
    with pytest.raises(TypeError, match="compare: timed_lengths must be a list of ints of at least 1; got 5"):
        compare(q, k, v, [Linear()], timed_lengths=5)
    with pytest.raises(ValueError, match=r"compare: timed_lengths must be a list of ints of at least 1; got \[0\]"):
        compare(q, k, v, [Linear()], timed_lengths=[0])
    with pytest.raises(ValueError, match="Linformer: keys must be at positions below 20"):
        compare(q, k, v, [Linformer(20, 4)])
    assert compare(q, k, v, []).rows == ()


def test_on_what_a_trained_model_attends_with() -> None:
    """Queries and keys of MiniLM are of large norm: many random features are few."""
    from saccade.models import minilm  # noqa: PLC0415  loads weights

    encoder = minilm()
    tokens, _ = encoder.tokenize(["The jump the eye makes from one thing worth looking at to the next. " * 6])
    layer = encoder.layers[2].attention
    seen: list[Tensor] = []
    with torch.no_grad(), layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        encoder(tokens)
    x = seen[0]
    q, k, v = (
        project(x).unflatten(2, (12, 32)).transpose(1, 2).detach()
        for project in (layer.query_projection, layer.key_projection, layer.value_projection)
    )
    torch.testing.assert_close(sc.attention(q, k, v), encoder.layers[2].attention.matrix(x) @ v)
    rows = compare(q, k, v, [Performer(64), Performer(1024), Nystrom(x.shape[1], iterations=None)]).rows
    assert rows[0].error_median > rows[1].error_median > 0.01
    assert rows[2].error_median < 1e-3
    assert all(a.name != b.name for a, b in itertools.combinations(rows, 2))


@pytest.mark.parametrize("mask", [None, Causal(), Padding([48, 20])], ids=str)
def test_a_mask_is_a_row_of_exact_attention_under_both_masks(mask: Mask | None) -> None:
    q, k, v = _inputs()
    row = compare(q, k, v, [Window(5, 2)], mask=mask).rows[0]
    visible = torch.ones(2, 1, 48, 48, dtype=torch.bool) if mask is None else mask.to_dense(48, batch=2)
    i, j = torch.arange(48)[:, None], torch.arange(48)
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    both = visible & (i - j <= 5) & (j - i <= 2)
    exact, near = (scores.masked_fill(~x, -math.inf).softmax(-1).nan_to_num() for x in (visible, both))
    value = v.repeat_interleave(2, 1)
    errors = (near @ value - exact @ value).norm(dim=-1) / (exact @ value).norm(dim=-1)
    assert row.error_median == pytest.approx(errors.median().item(), rel=1e-4)
    assert row.error_worst == pytest.approx(errors.max().item(), rel=1e-4)
    distances = (near - exact).abs().sum(-1).flatten() / 2
    picked = distances[torch.linspace(0, distances.numel() - 1, 64).round().long()]
    assert row.distance_median == pytest.approx(picked.median().item(), rel=1e-4, abs=1e-6)
    assert row.name == "Window(5, 2)"


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(9, 0), Padding([48, 20])], ids=str)
@pytest.mark.parametrize("left, hides_nothing", [(47, True), (46, False)])
def test_a_mask_that_hides_no_pair_is_not_called_close(mask: Mask | None, left: int, hides_nothing: bool) -> None:
    q, k, v = _inputs()
    row = compare(q, k, v, [Window(left, 47)], mask=mask, timed_lengths=[48]).rows[0]
    reads_first = mask is None or bool(mask.to_dense(48, batch=2)[0, 0, 47, 0])
    expected = hides_nothing or not reads_first
    assert row.hides_nothing == expected
    assert row.verdict.startswith("hides no pair") == expected


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(9, 0), Padding([48, 0])], ids=str)
def test_torchs_own_attention_is_a_row(mask: Mask | None) -> None:
    q, k, v = _inputs()
    result = compare(q, k, v, [Window(5, 2)], mask=mask)
    assert result.sdpa is not None
    assert result.sdpa.error_worst < 1e-5
    assert math.isnan(result.sdpa.distance_median)
    written = 0 if mask is None or mask == Causal() else math.prod(mask.shape) * 48 * 48
    assert result.sdpa.memory_bytes >= written + 2 * 4 * 48 * 5 * 4
    assert str(result).splitlines()[3].startswith("torch SDPA")
    assert repr(result) == str(result)


def test_torchs_attention_of_fewer_queries_than_keys_is_aligned_like_ours() -> None:
    q, k, v = _inputs()
    result = compare(q[:, :, :7], k, v, [], mask=Causal())
    assert result.sdpa is not None
    assert result.sdpa.error_worst < 1e-5


def test_torchs_attention_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _inputs()
    monkeypatch.setattr(comparison_contenders, "_LARGEST_MASK", 48 * 48 - 1)
    result = compare(q, k, v, [], mask=Window(5, 2))
    assert result.sdpa is not None
    assert result.sdpa.reasons == ("its mask would be a tensor of 0.0 GiB",)
    assert "torch SDPA: refused: its mask would be" in str(result)
    assert compare(q, k, v, [], mask=Causal()).sdpa.reasons == ()
    monkeypatch.setattr(comparison_contenders, "_LARGEST_MASK", 48 * 48)
    asked = compare(q, k, v, [], mask=Window(5, 2)).sdpa
    assert (asked.reasons, asked.timed_to) == ((), 48)


def test_a_mask_of_the_batch_is_not_timed_beyond_it() -> None:
    row = compare(*_inputs(40), [Padding([40, 20]), Window(3, 3)], timed_lengths=[20, 80]).rows
    assert [one.timed_to for one in row] == [40, 80]


def test_long_names_of_masks_are_cut_unless_they_would_be_alike() -> None:
    long = Window(1, 2) | Causal() & ~Window(3, 4) | Window(5, 6) & ~Window(7, 8)
    alike = [long | Documents([24, 24]), long | Documents([20, 28])]
    names = [row.name for row in compare(*_inputs(), [long, Linear(), Causal()]).rows]
    assert names[1:] == ["Linear", "Causal()"]
    assert len(names[0]) == 48
    assert names[0].endswith("...")
    assert len({row.name for row in compare(*_inputs(), alike).rows}) == 2


def test_quality_is_asked_for_each_row_that_runs_and_for_exact_attention() -> None:
    asked: list[object] = []

    def quality(one: Mechanism | Mask) -> float:
        asked.append(one)
        return len(asked) / 8

    linear, window = Linear(), Window(3, 0)
    result = compare(*_inputs(), [linear, Nystrom(4), window], mask=Causal(), quality=quality)
    assert isinstance(asked[0], Softmax)
    assert asked[1:] == [linear, window]
    assert result.exact_quality == 0.125
    assert [row.quality for row in result.rows] == [0.25, pytest.approx(math.nan, nan_ok=True), 0.375]
    table = str(result).splitlines()
    assert table[1].split()[-1] == "quality"
    assert [line.split()[-1] for line in table[2:7]] == ["0.125", "-", "0.250", "-", "0.375"]
    assert "quality" not in str(compare(*_inputs(), [linear]))


@torch.no_grad()
def test_caches_are_rows_of_error_beside_size() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 150, 16).unbind()
    own = [KVCache(), Int8Cache(32), QuantizedCache(4, 32), QuantizedCache(2, 32)]
    comparison = sc.compare(query, key, value, [], mask=sc.masks.Causal(), timed_lengths=[150], caches=own)
    names = ["KVCache()", "Int8Cache(32)", "QuantizedCache(4, 32)", "QuantizedCache(2, 32)"]
    assert [row.name for row in comparison.caches] == names
    exact, *rounded = comparison.caches
    assert exact.share == 1.0
    assert exact.error_worst < 1e-6
    assert 0 < rounded[0].error_median < rounded[1].error_median < rounded[2].error_median
    assert exact.stored_bytes > rounded[0].stored_bytes > rounded[1].stored_bytes > rounded[2].stored_bytes
    fresh = QuantizedCache(2, 32)
    parts = [
        fresh.attend(sc.mechanisms.Softmax(), *some, mask=sc.masks.Causal())
        for some in zip(*(x.split(64, 2) for x in (query, key, value)), strict=True)
    ]
    expected = sc.attention(query, key, value, mask=sc.masks.Causal())
    errors = (torch.cat(parts, 2) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rounded[2].error_median == pytest.approx(errors.double().median().item(), rel=1e-4)
    assert rounded[2].stored_bytes == fresh.nbytes
    assert all(one.length == 0 for one in own)
    assert re.search(r"QuantizedCache\(2, 32\) +[\d.]+ +[\d.]+ +[\d.]+ KiB +\d+%", str(comparison))


def test_caches_need_a_causal_text() -> None:
    query, key, value = torch.randn(3, 1, 2, 20, 4).unbind()
    comparison = sc.compare(query, key, value, [], timed_lengths=[20], caches=[Int8Cache()])
    assert math.isnan(comparison.caches[0].error_median)
    assert "Int8Cache(64): refused: a cache needs a causal mask" in str(comparison)
    dropping = sc.compare(
        query, key, value, [], mask=sc.masks.Causal(), timed_lengths=[20], caches=[RecurrentCache()]
    ).caches[0]
    assert "cannot be continued as a sum over keys" in dropping.reasons[0]


@pytest.mark.parametrize(("wrong", "rule"), [([Int8Cache], "be a list of caches"), (3, "be a list of caches")])
def test_what_is_no_cache_is_refused(wrong: object, rule: str) -> None:
    x = torch.randn(1, 1, 4, 2)
    with pytest.raises(TypeError, match=rule):
        sc.compare(x, x, x, [], caches=wrong)  # type: ignore[arg-type]
    full = KVCache()
    full.attend(sc.mechanisms.Softmax(), x, x, x, mask=sc.masks.Causal())
    with pytest.raises(ValueError, match="caches must be empty; got 4 tokens"):
        sc.compare(x, x, x, [], caches=[full])
