"""Every statistic equals its definition on the dense matrix, whatever the mask and however the rows are cut."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.sampled import sampled
from tests.statistics.dense_matrices import EVERY, dense_of, matrix_of
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.statistics import Block, Entropy, MatrixInfo, Pooled, Received, Statistic, Strongest, TopK
from saccade.testing import CASES, LARGE_CASES, Case
from saccade.testing.largest_tensor import largest_tensor

QUESTIONS = (Entropy(), TopK(3), Received(), Pooled(4), Pooled(4, "sum"), Pooled(4, "max"))


def entropy_of(weights: Tensor) -> Tensor:
    return -torch.where(weights > 0, weights * weights.clamp_min(1e-300).log(), 0.0).sum(-1)


def pooled_of(weights: Tensor, bins: int, how: str) -> Tensor:
    """The definition of a pooled map: which queries and keys share a cell, said by membership."""
    q_len, kv_len = weights.shape[2:]
    rows, columns = min(bins, q_len), min(bins, kv_len)
    mine = torch.tensor([[r * rows // q_len == i for r in range(q_len)] for i in range(rows)])
    keys = torch.tensor([[c * columns // kv_len == j for c in range(kv_len)] for j in range(columns)])
    if how == "max":
        inside = mine[:, None, :, None] & keys[None, :, None, :]
        return torch.where(inside, weights[:, :, None, None], 0.0).amax((-1, -2))
    sums = mine.double() @ weights @ keys.double().T
    seeing = (mine * (weights.sum(-1) > 0)[:, :, None]).sum(-1)
    return sums if how == "sum" else sums / seeing.clamp_min(1)[..., None]


def check(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    dense = dense_of(case, dtype)
    matrix = matrix_of(case, dtype)
    strongest, received, *maps = matrix.compute(*QUESTIONS[1:])
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    assert strongest.weights.dtype == received.dtype == maps[0].dtype == dtype
    if matrix.is_stochastic:
        assert matrix.entropy().dtype == dtype
        torch.testing.assert_close(matrix.entropy(), entropy_of(dense), **close)
    torch.testing.assert_close(received, dense.sum(2), **close)
    for statistic, cells in zip(QUESTIONS[3:], maps, strict=True):
        torch.testing.assert_close(cells, pooled_of(dense, 4, statistic.how), **close)
    padded = torch.nn.functional.pad(dense, (0, 3))
    torch.testing.assert_close(strongest.weights, padded.sort(-1, descending=True).values[..., :3], **close)
    attended = (dense > 0).sum(-1, keepdim=True)
    assert torch.equal(strongest.indices < 0, torch.arange(3) >= attended)
    found = dense.gather(-1, strongest.indices.clamp_min(0)) * (strongest.indices >= 0)
    torch.testing.assert_close(strongest.weights, found, **close)
    distinct = strongest.indices + torch.where(strongest.indices < 0, -torch.arange(3), 0)
    assert (distinct.sort(-1).values.diff(dim=-1) != 0).all()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("entries", [1 << 18, 20])
@pytest.mark.parametrize("case", sampled(EVERY, 4), ids=str)
def test_every_question_is_its_definition(case: Case, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", entries)
    check(case, torch.float64, 1e-10)
    check(case, torch.float32, 1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_and_where_rows_are_cut_into_many_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", 1 << 12)
    matrix, dense = matrix_of(case), dense_of(case)
    strongest, received, mean = matrix.compute(TopK(5), Received(), Pooled(32))
    torch.testing.assert_close(matrix.to_dense(), dense)
    if matrix.is_stochastic:
        torch.testing.assert_close(matrix.entropy(), entropy_of(dense))
    torch.testing.assert_close(strongest.weights, dense.topk(5).values)
    found = dense.gather(-1, strongest.indices.clamp_min(0)) * (strongest.indices >= 0)
    torch.testing.assert_close(found, strongest.weights)
    torch.testing.assert_close(received, dense.sum(2))
    torch.testing.assert_close(mean, pooled_of(dense, 32, "mean"))


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_blocks_hold_each_row_once_and_products_follow(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", 20)
    matrix, dense = matrix_of(case), dense_of(case)
    torch.testing.assert_close(matrix.to_dense(), dense)
    x = torch.randn(*dense.shape[:3], 2, dtype=torch.float64)
    torch.testing.assert_close(matrix.mT @ x, dense.mT @ x)
    value = torch.randn(case.batch, case.num_kv_heads, case.kv_len, 2, dtype=torch.float64)
    product = dense @ value.repeat_interleave(case.num_heads // case.num_kv_heads, 1)
    torch.testing.assert_close(sc.Matrix.matmul(matrix, value), product)
    torch.testing.assert_close(matrix[0, -1, case.q_len // 2], dense[0, -1, case.q_len // 2])
    seen = torch.zeros(dense.shape[:3], dtype=torch.int64)
    for block in matrix.blocks():
        seen[block.batch, block.heads, list(block.rows)] += 1
        assert block.weights.shape[3] == sum(map(len, block.columns))
        torch.testing.assert_close(block.log_weights.exp(), block.weights)
        assert torch.isfinite(block.log_weights).all()
    assert seen.max() <= 1
    assert (dense.sum(-1)[seen == 0] == 0).all()


def test_methods_are_questions() -> None:
    matrix = matrix_of(CASES[0])
    weights, indices = matrix.topk(2)
    for own, asked in (
        (matrix.entropy(), matrix.compute(Entropy())),
        (weights, matrix.compute(TopK(2))[0][:1]),
        (indices, matrix.compute(TopK(2))[0][1:]),
        (matrix.received(), matrix.compute(Received())),
        (matrix.pooled(3), matrix.compute(Pooled(3))),
        (matrix.pooled(3, how="max"), matrix.compute(Pooled(3, "max"))),
    ):
        assert torch.equal(own, asked[0])
    assert matrix.compute() == ()


def leaves(answer: Tensor | Strongest) -> tuple[Tensor, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


@pytest.mark.parametrize("statistic", QUESTIONS, ids=str)
def test_one_sweep_answers_as_many_do(statistic: Statistic) -> None:
    matrix = matrix_of(LARGE_CASES[1])
    alone = matrix.compute(statistic)[0]
    together = matrix.compute(*QUESTIONS)[QUESTIONS.index(statistic)]
    assert all(torch.equal(a, b) for a, b in zip(leaves(alone), leaves(together), strict=True))


def state_of(statistic: Statistic, info: MatrixInfo, blocks: list[Block]) -> object:
    state = statistic.start(info)
    for block in blocks:
        state = statistic.add(state, block)
    return state


SPLITS: dict[str, Callable[[sc.AttentionMatrix], list[list[Block]]]] = {
    "items": lambda A: [list(A.blocks(batch=b)) for b in range(2)] + [[]],
    "heads": lambda A: [list(A.blocks(head=h)) for h in range(4)],
    "rows": lambda A: [list(A.blocks(rows=rows)) for rows in (range(3), range(3, 4), range(4, 7))],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["streaming", "padding-empty-item", "dense", "predicate", "one-strided"])
@pytest.mark.parametrize("statistic", QUESTIONS, ids=str)
def test_states_of_different_rows_merge_in_any_order_and_grouping(statistic: Statistic, name: str, split: str) -> None:
    extra = Case("one-strided", masks.Strided(3))
    matrix = matrix_of(next(case for case in (*CASES, extra) if case.name == name))
    info = MatrixInfo(matrix.shape, torch.float64, matrix.device)
    parts = [state_of(statistic, info, blocks) for blocks in SPLITS[split](matrix)]
    whole = leaves(matrix.compute(statistic)[0])
    a, b, c = parts[0], parts[1], parts[2]
    rest = parts[3:]
    for start in (
        statistic.merge(statistic.merge(a, b), c),
        statistic.merge(a, statistic.merge(b, c)),
        statistic.merge(statistic.merge(c, a), b),
        statistic.merge(statistic.merge(statistic.start(info), c), statistic.merge(b, a)),
    ):
        merged = start
        for other in rest:
            merged = statistic.merge(merged, other)
        for got, want in zip(leaves(statistic.finish(merged)), whole, strict=True):
            torch.testing.assert_close(got, want)


def test_steps_of_decoding_add_up_to_the_whole_run() -> None:
    q, k = torch.randn(2, 4, 6, 8, dtype=torch.float64), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    whole = sc.AttentionMatrix(q, k, masks.Causal())
    info = MatrixInfo(whole.shape, torch.float64, whole.device)
    questions = (Entropy(), TopK(2), Received(), Pooled(3))
    states = [statistic.start(info) for statistic in questions]
    for t in range(6):
        step = sc.AttentionMatrix(q[:, :, t : t + 1], k[:, :, : t + 1], masks.Causal())
        for block in step.blocks():
            here = block._replace(rows=range(t, t + 1))
            states = [statistic.add(state, here) for statistic, state in zip(questions, states, strict=True)]
    for statistic, state, want in zip(questions, states, whole.compute(*questions), strict=True):
        for got, part in zip(leaves(statistic.finish(state)), leaves(want), strict=True):
            torch.testing.assert_close(got, part)


def test_statistics_add_up() -> None:
    matrix = matrix_of(next(case for case in CASES if case.name == "padding-empty-item"))
    seeing = (matrix.to_dense().sum(-1) > 0).sum(-1).double()
    torch.testing.assert_close(matrix.received().sum(-1), seeing)
    torch.testing.assert_close(matrix.pooled(3, how="sum").sum((2, 3)), seeing)
    torch.testing.assert_close(matrix.pooled(3).sum(-1), (seeing > 0).double()[..., None].expand(-1, -1, 3))
    assert torch.equal(matrix.entropy()[0], torch.zeros(4, 7, dtype=torch.float64))


@pytest.mark.usefixtures("either_way")
def test_uniform_rows_have_the_log_of_what_they_see() -> None:
    x = torch.zeros(1, 1, 40, 4)
    entropy = sc.AttentionMatrix(x, x, masks.Causal()).entropy()
    torch.testing.assert_close(entropy[0, 0], torch.arange(1, 41).log())
    assert str(entropy[0, 0, 0].item()) == "0.0"  # not -0.0
    received = sc.AttentionMatrix(x, x, masks.Causal()).received()[0, 0, 4]
    torch.testing.assert_close(received.item(), sum(1 / i for i in range(5, 41)), rtol=1e-6, atol=0.0)


def test_a_map_of_a_matrix_that_fits_is_the_matrix() -> None:
    matrix = matrix_of(next(case for case in CASES if case.name == "more-keys"))  # 5 queries, 9 keys
    for how in ("mean", "sum", "max"):
        torch.testing.assert_close(matrix.pooled(9, how=how), matrix.to_dense())
    assert matrix.pooled(7).shape == (2, 4, 5, 7)
    assert matrix.pooled(1).shape == (2, 4, 1, 1)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_matrices_without_entries_have_answers(shape: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = shape
    matrix = sc.AttentionMatrix(torch.ones(batch, heads, q_len, 2), torch.ones(batch, heads, kv_len, 2))
    entropy, strongest, received, mean, largest = matrix.compute(
        Entropy(), TopK(2), Received(), Pooled(2), Pooled(2, "max")
    )
    assert entropy.shape == shape[:3]
    assert strongest.weights.shape == (*shape[:3], 2)
    assert (strongest.indices == -1).all()
    assert received.shape == (batch, heads, kv_len)
    assert mean.shape == largest.shape == (batch, heads, min(2, q_len), min(2, kv_len))
    assert not any(x.any() for x in (entropy, strongest.weights, received, mean, largest))


@pytest.mark.usefixtures("either_way")
def test_peaked_rows_keep_their_precision() -> None:
    q, k = torch.full((1, 1, 1, 1), 18.0), torch.tensor([1.0, 0.0, 0.0])[None, None, :, None]
    p = 1 / (1 + 2 * math.exp(-18))
    want = -p * math.log1p(-2 * math.exp(-18) * p) - 2 * math.exp(-18) * p * math.log(math.exp(-18) * p)
    got = sc.AttentionMatrix(q, k, scale=1.0).entropy().item()
    assert got == pytest.approx(want, abs=torch.finfo(torch.float32).eps / 2)
    assert got > 0.0


class Given(sc.Matrix):
    """A matrix that is there, row by row, without logs."""

    kv_heads = 1
    dtype = torch.float64
    device = torch.device("cpu")

    def __init__(self, weights: Tensor, stochastic: bool = True):
        self.weights, self.stochastic = weights, stochastic

    @property
    def shape(self):
        return tuple(self.weights.shape)

    @property
    def is_stochastic(self):
        return self.stochastic

    def blocks(self, batch=None, head=None, rows=None):
        for i in range(self.shape[2]):
            own = self.weights[:, :, i : i + 1]
            yield Block(slice(0, self.shape[0]), slice(0, 1), range(i, i + 1), (range(self.shape[3]),), own)


def test_other_mechanisms_need_not_give_logs() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)[None, None]
    got = Given(weights).entropy()
    torch.testing.assert_close(got, torch.tensor([[[0.0, math.log(2), 0.0]]], dtype=torch.float64))


def test_rows_that_are_no_distributions_are_refused_by_those_who_need_them() -> None:
    weights = torch.tensor([[3.0, -1.0], [-2.0, -1.0]], dtype=torch.float64)[None, None]
    matrix = Given(weights, stochastic=False)
    with pytest.raises(sc.UnsupportedError, match=r"(?s)Given.compute: Entropy cannot .* Given do not sum to 1"):
        matrix.compute(Received(), Entropy())
    assert matrix.received().tolist() == [[[1.0, -2.0]]]
    weights, indices = matrix.topk(2)
    assert weights.tolist() == [[[[3.0, 0.0], [0.0, 0.0]]]]
    assert indices.tolist() == [[[[0, -1], [-1, -1]]]]
    assert matrix.pooled(2, how="max").tolist() == [[[[3.0, 0.0], [0.0, 0.0]]]]


def test_a_sink_leaves_rows_that_are_no_distributions() -> None:
    q, k = torch.randn(1, 2, 5, 4, dtype=torch.float64), torch.randn(1, 2, 5, 4, dtype=torch.float64)
    sink = torch.tensor([0.3, -1.0], dtype=torch.float64)
    scores = (q @ k.mT / 2).masked_fill(~masks.Causal().to_dense(5), -math.inf)
    want = torch.cat([scores, sink[None, :, None, None].expand(1, 2, 5, 1)], -1).softmax(-1)[..., :5]
    for wants_grad in (False, True):
        matrix = sc.AttentionMatrix(q.requires_grad_(wants_grad), k, masks.Causal(), sink_logit=sink)
        torch.testing.assert_close(matrix.to_dense(), want)
        torch.testing.assert_close(matrix.received(), want.sum(2))
        torch.testing.assert_close(matrix.lse, torch.logaddexp(scores.logsumexp(-1), sink[None, :, None]))
    with pytest.raises(sc.UnsupportedError, match="do not sum to 1"):
        matrix.entropy()


def test_wide_rows_are_selected_from_in_two_steps() -> None:
    q, k = torch.randn(1, 2, 5, 16, dtype=torch.float64), torch.randn(1, 2, 3001, 16, dtype=torch.float64)
    for n in (1, 4, 8, 40, 3000):
        weights, indices = sc.AttentionMatrix(q, k).topk(n)
        want = (q @ k.mT / 4).softmax(-1).topk(n)
        torch.testing.assert_close(weights, want.values)
        assert torch.equal(indices, want.indices)


@pytest.mark.usefixtures("either_way")
def test_questions_keep_no_graph() -> None:
    q, k = torch.randn(1, 2, 9, 4, requires_grad=True), torch.randn(1, 2, 9, 4, requires_grad=True)
    matrix = sc.AttentionMatrix(q, k, masks.Causal())
    for answer in matrix.compute(*QUESTIONS):
        assert not any(x.requires_grad for x in leaves(answer))
    (matrix.mT @ torch.ones(1, 2, 9, 1)).sum().backward()  # and do not disturb what has one
    assert q.grad is not None


@pytest.mark.usefixtures("either_way")
def test_autocast_does_not_round_the_questions() -> None:
    matrix = matrix_of(LARGE_CASES[1], torch.float32)
    want = matrix.compute(*QUESTIONS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = matrix.compute(*QUESTIONS)
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.usefixtures("either_way")
def test_questions_leave_the_ingredients_alone() -> None:
    problem = CASES[0].problem()
    before = problem.query.clone(), problem.key.clone()
    sc.AttentionMatrix(problem.query, problem.key, softcap=2.0).compute(*QUESTIONS)
    assert torch.equal(problem.query, before[0])
    assert torch.equal(problem.key, before[1])


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("side", ["query", "key"])
def test_a_nan_stays_in_the_rows_that_it_reaches(side: str) -> None:
    q, k = torch.randn(1, 2, 9, 4, dtype=torch.float64), torch.randn(1, 2, 9, 4, dtype=torch.float64)
    clean = sc.AttentionMatrix(q, k, masks.Causal())
    broken = {"query": q, "key": k}
    broken[side] = broken[side].clone()
    broken[side][0, 1, 5] = math.nan
    reached = torch.zeros(1, 2, 9, dtype=torch.bool)
    reached[0, 1, 5 : 6 if side == "query" else 9] = True
    matrix = sc.AttentionMatrix(broken["query"], broken["key"], masks.Causal())
    entropy, strongest = matrix.compute(Entropy(), TopK(3))
    assert entropy[reached].isnan().all()
    assert strongest.weights[reached].isnan().all()
    assert (strongest.indices[reached] == -1).all()
    torch.testing.assert_close(entropy[~reached], clean.entropy()[~reached])
    torch.testing.assert_close(strongest.weights[~reached], clean.topk(3).weights[~reached])
    received, mean, largest = matrix.compute(Received(), Pooled(3), Pooled(3, "max"))
    torch.testing.assert_close(received[0, 0], clean.received()[0, 0])
    assert received[0, 1, :6].isnan().all()
    for cells, how in ((mean, "mean"), (largest, "max")):
        torch.testing.assert_close(cells[:, :, :1], clean.pooled(3, how=how)[:, :, :1])
        assert cells[0, 1, 1, 0].isnan()


@pytest.mark.ci
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(100, 0) | masks.Global([0])])
def test_memory_is_that_of_the_answers_and_a_block(mask: masks.Mask | None) -> None:
    q = torch.randn(1, 1, 4000, 4)
    matrix = sc.AttentionMatrix(q, q, mask)
    assert largest_tensor(lambda: matrix.compute(*QUESTIONS)) < 4000 * 4000 * 4 / 10


def test_very_long_rows_make_low_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", 1 << 10)
    matrix = sc.AttentionMatrix(torch.randn(1, 1, 40, 4), torch.randn(1, 1, 60_000, 4))
    assert [len(block.rows) for block in matrix.blocks()] == [1] * 40


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TopK(0), ValueError, "TopK: k must be an int of at least 1; got 0"),
        (lambda: TopK(2.0), TypeError, "TopK: k must be an int of at least 1; got 2.0"),
        (lambda: TopK(True), TypeError, "TopK: k must be an int of at least 1; got True"),
        (lambda: Pooled(0), ValueError, "Pooled: bins must be an int of at least 1; got 0"),
        (lambda: Pooled("4"), TypeError, "Pooled: bins must be an int of at least 1; got '4'"),
        (lambda: Pooled(4, "median"), ValueError, "Pooled: how must be one of 'mean', 'sum', 'max'; got 'median'"),
        (lambda: matrix_of(CASES[0]).compute(Entropy), TypeError, "AttentionMatrix.compute: .* got the class Entropy"),
        (lambda: matrix_of(CASES[0]).compute("entropy"), TypeError, "compute: statistics must be instances .* got str"),
        (lambda: matrix_of(CASES[0]).topk(-1), ValueError, "AttentionMatrix.topk: k must .*; got -1"),
        (
            lambda: list(matrix_of(CASES[0]).blocks(rows=range(0, 4, 2))),
            ValueError,
            r"AttentionMatrix.blocks: rows must be a range with step 1; got range\(0, 4, 2\)",
        ),
    ],
)
def test_bad_questions_are_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
