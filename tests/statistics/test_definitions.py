"""Each statistic of a row, a column or a head equals its definition on the dense matrix."""

import math

import pytest
import torch
from tests.sampled import sampled
from tests.statistics.dense_matrices import EVERY, dense_of, lags_of, matrix_of
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.statistics import (
    Block,
    Coverage,
    Distance,
    InductionMass,
    LagMass,
    LagProfile,
    LargestLogit,
    LargestWeight,
    LocalMass,
    LogitVariance,
    MatrixInfo,
    PositionInformation,
    SinkMass,
    SquaredNorm,
    Statistic,
    positions_of,
)
from saccade.statistics.per_row import PositionPair
from saccade.testing import LARGE_CASES, Case


def defined(name: str, p: Tensor, lags: Tensor, kv: Tensor) -> Tensor:
    """Return a statistic by definition, in float64, from dense weights."""
    logs = torch.where(p > 0, p.clamp_min(1e-300).log(), 0.0)
    of_rows = {
        "largest": lambda: p.amax(-1),
        "squares": lambda: (p * p).sum(-1),
        "sink": lambda: (p * ((kv >= 0) & (kv < 3))).sum(-1),
        "own": lambda: (p * (lags == 0)).sum(-1),
        "before": lambda: (p * (lags == 1)).sum(-1),
        "ahead": lambda: (p * (lags == -2)).sum(-1),
        "local": lambda: (p * (lags.abs() <= 2)).sum(-1),
        "distance": lambda: (p * lags.abs()).sum(-1),
        "variance": lambda: (p * (logs - (p * logs).sum(-1, keepdim=True)) ** 2).sum(-1),
    }
    if name in of_rows:
        return of_rows[name]()
    rows = (p.sum(-1) > 0.5).sum(-1).clamp_min(1)
    mean = p.sum(-2) / rows[..., None]
    surprise = p * (p.clamp_min(1e-300) / mean.clamp_min(1e-300)[..., None, :]).log()
    return surprise.sum((-1, -2)) / rows  # the mean divergence from the mean row: another way to write it


def statistics_of(positions: PositionPair | None) -> dict[str, Statistic]:
    return {
        "largest": LargestWeight(),
        "squares": SquaredNorm(),
        "sink": SinkMass(3, positions),
        "own": LagMass(0, positions),
        "before": LagMass(1, positions),
        "ahead": LagMass(-2, positions),
        "local": LocalMass(2, positions),
        "distance": Distance(positions),
        "variance": LogitVariance(),
        "information": PositionInformation(),
    }


def asked_of(matrix: sc.AttentionMatrix, positions: PositionPair | None) -> dict[str, Statistic]:
    return {
        name: statistic
        for name, statistic in statistics_of(positions).items()
        if matrix.is_stochastic or not statistic.needs_distributions
    }


def check(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    matrix, dense = matrix_of(case, dtype), dense_of(case, dtype)
    lags, kv = lags_of(case)
    questions = asked_of(matrix, positions_of(matrix))
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    for (name, statistic), answer in zip(questions.items(), matrix.compute(*questions.values()), strict=True):
        assert answer.dtype == dtype
        assert not answer.requires_grad
        torch.testing.assert_close(
            answer, defined(name, dense, lags, kv), msg=lambda m, f=statistic: f"{f}: {m}", **close
        )


def check_lags(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    matrix, dense = matrix_of(case, dtype), dense_of(case, dtype)
    lags, kv = lags_of(case)
    profile = matrix.compute(LagProfile(positions_of(matrix)))[0]
    is_at = (lags[..., None] == profile.lags) & (kv >= 0)[..., None]
    want = torch.einsum("bhij,bhijl->bhl", dense, is_at.double().expand(*dense.shape, -1))
    torch.testing.assert_close(profile.sums, want, rtol=tolerance, atol=tolerance, check_dtype=False)
    torch.testing.assert_close(profile.sums.sum(-1).double(), dense.sum((-1, -2)), rtol=1e-5, atol=1e-5)


def check_coverage(case: Case) -> None:
    matrix, dense = matrix_of(case), dense_of(case)
    if not matrix.is_stochastic:
        return
    shares = (0.3, 0.5, 0.9, 0.999)
    got = matrix.compute(Coverage(shares))[0]
    held = dense.sort(-1, descending=True).values.cumsum(-1)
    for place, share in enumerate(shares):
        short = (held < share * held[..., -1:] - 1e-12).sum(-1)
        assert torch.equal(got[..., place], torch.where(held[..., -1] > 0, short + 1, 0))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("entries", [1 << 18, 20])
@pytest.mark.parametrize("case", sampled(EVERY, 4), ids=str)
def test_every_statistic_is_its_definition(case: Case, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", entries)
    check(case, torch.float64, 1e-10)
    check(case, torch.float32, 1e-4)
    check_lags(case, torch.float64, 1e-10)
    check_coverage(case)


@pytest.mark.ci
@pytest.mark.parametrize("case", sampled(LARGE_CASES, 4), ids=str)
def test_and_where_rows_are_cut_into_many_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", 1 << 12)
    check(case, torch.float64, 1e-10)
    check_coverage(case)
    matrix, dense = matrix_of(case), dense_of(case)
    profile = matrix.compute(LagProfile(positions_of(matrix)))[0]
    lags, _ = lags_of(case)
    for lag in (0, 1, 7, -3):
        want = (dense * (lags == lag)).sum((-1, -2))
        torch.testing.assert_close(profile.sums[..., int((profile.lags == lag).nonzero())], want)


@pytest.mark.parametrize("seed", range(6))
def test_and_of_random_masks_with_grouped_heads(seed: int) -> None:
    torch.manual_seed(seed)
    allowed = torch.rand(2, 1, 13, 19) < 0.3
    q, k = torch.randn(2, 6, 13, 8, dtype=torch.float64) * 3, torch.randn(2, 2, 19, 8, dtype=torch.float64)
    scores = (q @ k.repeat_interleave(3, 1).mT) * 8**-0.5
    dense = scores.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num()
    matrix = sc.AttentionMatrix(q, k, allowed)
    lags = torch.arange(6, 19)[:, None] - torch.arange(19)
    questions = statistics_of(None)
    for (name, statistic), answer in zip(questions.items(), matrix.compute(*questions.values()), strict=True):
        want = defined(name, dense, lags, torch.arange(19))
        torch.testing.assert_close(answer, want, rtol=1e-10, atol=1e-10, msg=lambda m, f=statistic: f"{f}: {m}")
    largest = matrix.compute(LargestLogit(matrix.lse))[0]
    torch.testing.assert_close(largest, scores.masked_fill(~allowed, -math.inf).amax(-1), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("either_way")
def test_a_row_that_sees_nothing_has_the_largest_logit_of_nothing() -> None:
    x = torch.randn(1, 1, 3, 4)
    matrix = sc.AttentionMatrix(x, x, torch.tensor([[True, False, False], [False] * 3, [True] * 3]))
    for question in (LargestLogit(matrix.lse), LargestLogit()):
        assert matrix.compute(question)[0][0, 0, 1] == -math.inf


def test_the_largest_logit_is_known_with_a_sink_softcap_and_bias() -> None:
    q, k = torch.randn(1, 2, 5, 4, dtype=torch.float64) * 4, torch.randn(1, 2, 7, 4, dtype=torch.float64)
    bias = torch.randn(1, 2, 5, 7, dtype=torch.float64)
    sink = torch.tensor([0.5, -2.0], dtype=torch.float64)
    matrix = sc.AttentionMatrix(q, k, bias=bias, softcap=3.0, sink_logit=sink)
    want = (3.0 * (q @ k.mT / 2 / 3.0).tanh() + bias).amax(-1)
    for question in (LargestLogit(matrix.lse), LargestLogit()):
        torch.testing.assert_close(matrix.compute(question)[0], want)


def state_of(statistic: Statistic, info: MatrixInfo, blocks: list[Block]) -> object:
    state = statistic.start(info)
    for block in blocks:
        state = statistic.add(state, block)
    return state


def leaves(answer: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


@pytest.mark.parametrize("name", ["streaming", "padding-empty-item", "dense", "predicate", "strided"])
@pytest.mark.parametrize("statistic", [*statistics_of(None).values(), LagProfile(), Coverage(), InductionMass], ids=str)
def test_states_of_different_rows_merge_in_any_order(statistic: Statistic | type[InductionMass], name: str) -> None:
    case = next(case for case in EVERY if case.name == name)
    statistic = (
        statistic if isinstance(statistic, Statistic) else statistic(tuple(key % 4 for key in range(case.kv_len)))
    )
    matrix = matrix_of(case)
    info = MatrixInfo(matrix.shape, torch.float64, matrix.device)
    cuts = (range(3), range(3, 4), range(4, case.q_len))
    whole = leaves(matrix.compute(statistic)[0])
    a, b, c = (state_of(statistic, info, list(matrix.blocks(rows=rows))) for rows in cuts)
    for merged in (
        statistic.merge(statistic.merge(a, b), c),
        statistic.merge(a, statistic.merge(b, c)),
        statistic.merge(statistic.merge(c, a), b),
        statistic.merge(statistic.merge(statistic.start(info), c), statistic.merge(b, a)),
    ):
        for got, want in zip(leaves(statistic.finish(merged)), whole, strict=True):
            torch.testing.assert_close(got, want)


def test_steps_of_decoding_add_up_to_the_whole_run() -> None:
    q, k = torch.randn(2, 4, 6, 8, dtype=torch.float64), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    whole = sc.AttentionMatrix(q, k, masks.Causal())
    info = MatrixInfo(whole.shape, torch.float64, whole.device)
    questions = [*statistics_of(None).values(), LagProfile(), Coverage(), InductionMass((3, 1, 3, 1, 3, 3))]
    states = [statistic.start(info) for statistic in questions]
    for t in range(6):
        step = sc.AttentionMatrix(q[:, :, t : t + 1], k[:, :, : t + 1], masks.Causal())
        for block in step.blocks():
            here = block._replace(rows=range(t, t + 1))
            states = [statistic.add(state, here) for statistic, state in zip(questions, states, strict=True)]
    for statistic, state, want in zip(questions, states, whole.compute(*questions), strict=True):
        for got, part in zip(leaves(statistic.finish(state)), leaves(want), strict=True):
            torch.testing.assert_close(got, part)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_matrices_without_entries_have_answers(shape: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = shape
    matrix = sc.AttentionMatrix(torch.ones(batch, heads, q_len, 2), torch.ones(batch, heads, kv_len, 2))
    questions = statistics_of(None)
    for (name, _), answer in zip(questions.items(), matrix.compute(*questions.values()), strict=True):
        assert answer.shape == (shape[:2] if name == "information" else shape[:3])
        assert not answer.any()
    lags, coverage = matrix.compute(LagProfile(), Coverage())
    assert not lags.sums.any()
    assert coverage.shape == (*shape[:3], 3)
    assert not coverage.any()


@pytest.mark.usefixtures("either_way")
def test_a_nan_row_is_nan_and_touches_no_other() -> None:
    q, k = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    clean = sc.AttentionMatrix(q, k, masks.Causal())
    spoilt = q.clone()
    spoilt[0, 0, 3] = math.nan
    matrix = sc.AttentionMatrix(spoilt, k, masks.Causal())
    others = [0, 1, 2, 4, 5]
    questions = [statistic for name, statistic in statistics_of(None).items() if name != "information"]
    for statistic, got, want in zip(questions, matrix.compute(*questions), clean.compute(*questions), strict=True):
        torch.testing.assert_close(got[..., others], want[..., others])
        if not isinstance(statistic, LagMass) or statistic.lag >= 0:
            assert got[0, 0, 3].isnan(), statistic
    coverage = matrix.compute(Coverage())[0]
    assert coverage[0, 0, 3].tolist() == [-1, -1, -1]
    assert (coverage[0, 0, others] > 0).all()


@pytest.mark.usefixtures("either_way")
def test_uniform_rows_have_what_can_be_worked_out() -> None:
    x = torch.zeros(1, 1, 40, 4)
    matrix = sc.AttentionMatrix(x, x, masks.Causal())
    distance, coverage, profile, variance = matrix.compute(Distance(), Coverage(), LagProfile(), LogitVariance())
    torch.testing.assert_close(distance[0, 0], torch.arange(40) / 2)
    assert coverage[0, 0, 39].tolist() == [20, 36, 40]
    assert coverage[0, 0, :4, 0].tolist() == [1, 1, 2, 2]
    torch.testing.assert_close(variance, torch.zeros(1, 1, 40), rtol=0.0, atol=1e-9)
    assert profile.lags.tolist() == list(range(-39, 40))
    assert profile.sums[0, 0, 39 + 38].item() == pytest.approx(1 / 39 + 1 / 40)


@pytest.mark.usefixtures("either_way")
def test_far_away_tokens_keep_their_distance_in_float32() -> None:
    n = 70_000
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, n, 4)
    q[..., 0], k[0, 0, n - 3, 0] = 100.0, 100.0
    distance = sc.AttentionMatrix(q, k, scale=1.0).compute(Distance())[0].item()
    assert distance == pytest.approx(2.0, rel=1e-6)


def test_weights_without_logs_will_do() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]], dtype=torch.float64)[None, None]
    block = Block(slice(0, 1), slice(0, 1), range(2), (range(3),), weights)
    statistic, info = LogitVariance(), MatrixInfo((1, 1, 2, 3), torch.float64, torch.device("cpu"))
    mean = 0.5 * math.log(0.5) + 0.5 * math.log(0.25)
    want = 0.5 * (math.log(0.5) - mean) ** 2 + 0.5 * (math.log(0.25) - mean) ** 2
    got = statistic.finish(statistic.add(statistic.start(info), block))
    torch.testing.assert_close(got, torch.tensor([[[0.0, want]]], dtype=torch.float64))


def test_columns_in_any_order_will_do() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)[None, None]
    block = Block(slice(0, 1), slice(0, 1), range(3, 4), (range(3, 5), range(1, 2)), weights)
    info = MatrixInfo((1, 1, 4, 6), torch.float64, torch.device("cpu"))  # query 3 stands at 5
    for statistic, want in ((LagMass(2), 0.5), (LagMass(1), 0.3), (LagMass(4), 0.2), (Distance(), 1.0 + 0.3 + 0.8)):
        got = statistic.finish(statistic.add(statistic.start(info), block))[0, 0, 3].item()
        assert got == pytest.approx(want), statistic


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: SinkMass(0), ValueError, "SinkMass: sink_tokens must be an int of at least 1; got 0"),
        (lambda: SinkMass(True), TypeError, "SinkMass: sink_tokens must be an int of at least 1; got True"),
        (lambda: LagMass(0.5), TypeError, "LagMass: lag must be an int; got 0.5"),
        (lambda: LocalMass(-1), ValueError, "LocalMass: width must be an int of at least 0; got -1"),
        (lambda: LocalMass(1, positions=3), TypeError, "LocalMass: positions must be a pair, .* got int"),
        (lambda: Distance(positions=3), TypeError, "Distance: positions must be a pair, .* got int"),
        (lambda: LagProfile(positions=3), TypeError, "LagProfile: positions must be a pair, .* got int"),
        (lambda: Coverage(0.5), TypeError, "Coverage: shares must be a tuple of numbers; got float"),
        (lambda: Coverage(()), ValueError, "Coverage: shares must contain at least one number"),
        (
            lambda: Coverage((0.5, math.nan)),
            ValueError,
            "Coverage: each of shares must be a finite number above 0 and below 1; got nan",
        ),
        (lambda: LargestLogit(3.0), TypeError, "LargestLogit: lse must be a tensor or None; got float"),
        (lambda: Distance((range(3),)), TypeError, "Distance: positions must be a pair, .* got tuple"),
        (lambda: LagMass(0, (torch.zeros(3), range(3))), TypeError, "LagMass: q_positions must be a range, an int64"),
        (lambda: LagProfile(([0], [-2])), ValueError, "LagProfile: kv_positions must be at least -1"),
    ],
)
def test_bad_arguments_are_named(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


def test_positions_may_be_anything_that_a_matrix_takes() -> None:
    x = torch.randn(2, 1, 4, 8)
    q, kv = [[3, 4, 5, 6], [-1, 0, 1, 2]], torch.arange(4)
    matrix = sc.AttentionMatrix(x, x, masks.Full(), q_positions=q, kv_positions=range(4))
    for make in (Distance, lambda pair: LagMass(1, pair), lambda pair: SinkMass(2, pair), LagProfile):
        got, want = matrix.compute(make((q, kv)), make(positions_of(matrix)))
        for one, other in zip(leaves(got), leaves(want), strict=True):
            assert torch.equal(one, other)


def test_a_log_sum_exp_of_another_matrix_is_refused() -> None:
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"LargestLogit: lse must be \[1, 1, 3\]; got \[1, 1, 2\]"):
        sc.AttentionMatrix(x, x).compute(LargestLogit(torch.zeros(1, 1, 2)))


def test_even_rows_of_any_length_are_covered_by_as_many_keys_as_they_must() -> None:
    for n in (1, 2, 9, 10, 20, 50, 100, 200, 300):
        got = sc.AttentionMatrix(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, n, 4)).compute(Coverage((0.5, 0.3)))[0]
        assert got.tolist() == [[[[-(-n // 2), -(-3 * n // 10)]]]], n
