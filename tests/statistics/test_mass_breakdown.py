"""Parts divide every row among the sink, the window, the strongest blocks and the rest, key by key."""

import math

import pytest
import torch
from tests.sampled import sampled
from tests.statistics.dense_matrices import EVERY, dense_of, lags_of, matrix_of
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.mechanisms import Linear
from saccade.statistics import Block, MatrixInfo, Parts, positions_of
from saccade.testing import LARGE_CASES, Case
from saccade.testing.largest_tensor import largest_tensor

SETTINGS = (
    Parts(1, 2, 1, 2),
    Parts(4, 3, 2, 1),
    Parts(2, 1, 3, 3),
    Parts(0, 0, 2, 4),
    Parts(3, 0, 0, 2),
    Parts(0, 9, 50, 2),
)


def divided(p: Tensor, lags: Tensor, kv: Tensor, of: Parts) -> Tensor:
    """The definition, one row and one key at a time, in Python's floats."""
    out = torch.zeros(*p.shape[:3], 4, dtype=torch.float64)
    lags, kv = (x.expand(p.shape).tolist() for x in (lags, kv))
    for (b, h, i), parts in zip(
        torch.cartesian_prod(*map(torch.arange, p.shape[:3])).tolist(), out.view(-1, 4), strict=True
    ):
        blocks: dict[int, float] = {}
        for weight, lag, place in zip(p[b, h, i].tolist(), lags[b][h][i], kv[b][h][i], strict=True):
            if 0 <= place < of.sink:
                parts[0] += weight
            elif place >= 0 and abs(lag) < of.local:
                parts[1] += weight
            else:
                name = place // of.block_size if place >= 0 else -1
                blocks[name] = blocks.get(name, 0.0) + weight
        aside = blocks.pop(-1, 0.0)
        sums = sorted(blocks.values(), reverse=True)
        parts[2], parts[3] = sum(sums[: of.anchor]), sum(sums[of.anchor :]) + aside
    return out


def even(p: Tensor) -> Tensor:
    seen = (p > 0).double()
    return seen / seen.sum(-1, keepdim=True).clamp_min(1)


@pytest.mark.parametrize("entries", [1 << 18, 20])
@pytest.mark.parametrize("case", sampled(EVERY, 4), ids=str)
def test_parts_are_their_definition(case: Case, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", entries)
    dense, where = dense_of(case), lags_of(case)
    wanted = [divided(dense, *where, of) for of in SETTINGS]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        matrix = matrix_of(case, dtype)
        positions = positions_of(matrix)
        asked = [Parts(of.sink, of.local, of.anchor, of.block_size, positions) for of in SETTINGS]
        for want, got in zip(wanted, matrix.compute(*asked), strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, check_dtype=False)
            torch.testing.assert_close(got.sum(-1).double(), dense.sum(-1), rtol=1e-5, atol=1e-5)
            assert (got >= 0).all()


@pytest.mark.parametrize("pairs", [1 << 20, 30])
@pytest.mark.parametrize("case", sampled([LARGE_CASES[0], *EVERY], 4), ids=str)
def test_a_summary_tells_them_beside_uniform_attention(case: Case, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.statistics.uniform_baseline._PAIRS", pairs if case in EVERY else 1 << 14)
    dense, where, of = dense_of(case), lags_of(case), Parts(1, 2, 2, 2)
    summary = matrix_of(case).summary(of)
    sees = dense.sum(-1) > 0
    own, uniform = (divided(p, *where, of) for p in (dense, even(dense)))
    for place, name in enumerate(("sink", "local", "anchor", "rest")):
        measure = summary.named(f"{name}_part")
        for got, parts in ((measure.values, own), (measure.uniform, uniform)):
            want = (parts[..., place] * sees).sum(-1) / sees.sum(-1)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, equal_nan=True)
        torch.testing.assert_close(summary.rows[f"{name}_part"], own[..., place])
    plain = matrix_of(case).summary()
    assert plain.measures[-1].name == "logit_variance" or not matrix_of(case).is_stochastic
    assert len(summary.measures) == len(plain.measures) + 4


def test_a_summary_of_weights_without_a_mask_tells_them() -> None:
    torch.manual_seed(0)
    matrix = Linear()(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4))
    dense = matrix.to_dense()
    lags, kv = torch.arange(9)[:, None] - torch.arange(dense.shape[-1]), torch.arange(dense.shape[-1])
    for name, measure in ((one.name, one) for one in matrix.summary(Parts(1, 2, 1, 2)).measures[-4:]):
        place = ("sink_part", "local_part", "anchor_part", "rest_part").index(name)
        for got, p in ((measure.values, dense), (measure.uniform, even(dense))):
            want = divided(p, lags, kv, Parts(1, 2, 1, 2))[..., place].mean(-1)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("name", ["streaming", "padding-empty-item", "dense", "predicate", "strided"])
def test_states_of_different_rows_merge_in_any_order(name: str) -> None:
    case = next(case for case in EVERY if case.name == name)
    matrix, statistic = matrix_of(case), Parts(1, 2, 1, 2)
    info = MatrixInfo(matrix.shape, torch.float64, matrix.device)
    states = []
    for rows in (range(3), range(3, 4), range(4, case.q_len)):
        states.append(statistic.start(info))
        for block in matrix.blocks(rows=rows):
            states[-1] = statistic.add(states[-1], block)
    a, b, c = states
    for merged in (
        statistic.merge(statistic.merge(a, b), c),
        statistic.merge(a, statistic.merge(c, b)),
        statistic.merge(statistic.merge(c, a), b),
    ):
        torch.testing.assert_close(statistic.finish(merged), matrix.compute(statistic)[0])


def test_columns_in_any_order_will_do() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)[None, None]
    block = Block(slice(0, 1), slice(0, 1), range(3, 4), (range(3, 5), range(2)), weights)
    info = MatrixInfo((1, 1, 4, 6), torch.float64, torch.device("cpu"))  # query 3 stands at 5
    for statistic, want in ((Parts(1, 2, 1, 2), [0.15, 0.3, 0.5, 0.05]), (Parts(0, 0, 1, 3), [0.0, 0.0, 0.8, 0.2])):
        got = statistic.finish(statistic.add(statistic.start(info), block))[0, 0, 3]
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_a_nan_row_is_nan_and_touches_no_other() -> None:
    q, k = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    spoilt = q.clone()
    spoilt[0, 0, 3] = math.nan
    got, want = (sc.AttentionMatrix(x, k, masks.Causal()).compute(Parts(1, 2, 1, 2))[0] for x in (spoilt, q))
    others = [0, 1, 2, 4, 5]
    torch.testing.assert_close(got[..., others, :], want[..., others, :])
    assert got[0, 0, 3].isnan().all()


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_matrices_without_entries_have_parts(shape: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = shape
    matrix = sc.AttentionMatrix(torch.ones(batch, heads, q_len, 2), torch.ones(batch, heads, kv_len, 2))
    parts = matrix.compute(Parts())[0]
    assert parts.shape == (*shape[:3], 4)
    assert not parts.any()
    assert matrix.summary(Parts()).named("rest_part").values.shape == shape[:2]


@pytest.mark.ci
def test_no_tensor_is_as_large_as_the_matrix() -> None:
    x = torch.randn(1, 1, 4096, 8)
    matrix = sc.AttentionMatrix(x, x, masks.Causal())
    assert largest_tensor(lambda: matrix.summary(Parts())) <= 4096 * 4096  # bytes, of 4 for each weight


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Parts(sink=-1), ValueError, "Parts: sink must be an int of at least 0; got -1"),
        (lambda: Parts(local=0.5), TypeError, "Parts: local must be an int of at least 0; got 0.5"),
        (lambda: Parts(anchor=True), TypeError, "Parts: anchor must be an int of at least 0; got True"),
        (lambda: Parts(block_size=0), ValueError, "Parts: block_size must be an int of at least 1; got 0"),
        (lambda: Parts(positions=3), TypeError, "Parts: positions must be a pair, .* got int"),
        (
            lambda: sc.AttentionMatrix(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)).summary(4),
            TypeError,
            r"Matrix\.summary: parts must be Parts or None; got int",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()
