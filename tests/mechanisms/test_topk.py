"""Tests of selection alone: chosen keys, ties, blocks, kernels, caches, and indexers from elsewhere."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from tests.sampled import sampled
from torch import Tensor

from saccade import masks, mechanisms
from saccade.engine.block_sparse.by_key import ByBlock
from saccade.engine.block_sparse.gather import Gathered
from saccade.engine.block_sparse.selected_blocks_mask import SelectedBlocks
from saccade.engine.block_sparse.selection import stable_topk
from saccade.engine.kernels.kernel import Kernel
from saccade.scorers import BlockBounds, BlockMeans, DotProducts, LightningIndexer, Scorer
from saccade.support.errors import UnsupportedError

TORCH = torch.float64


def _chosen(scores: Tensor, allowed: Tensor, k: int, size: int) -> Tensor:
    """Return the pairs that are read, row by row, as the docstring says."""
    picked = torch.zeros_like(allowed)
    for place in torch.cartesian_prod(*map(torch.arange, allowed.shape[:3])).tolist():
        row, own = allowed[tuple(place)], scores[tuple(place)]
        spans = [slice(i, i + size) for i in range(0, len(row), size)]
        part = [j for j, span in enumerate(spans) if row[span].any() and int(row[span].sum()) < size]
        forced = set(part)
        whole = [j for j, span in enumerate(spans) if row[span].any() and j not in forced]
        ranked = sorted(whole, key=lambda j: (-own[j].item(), j))
        for j in [*forced, *ranked[: max(0, k - len(forced))]]:
            picked[tuple(place)][spans[j]] = row[spans[j]]
    return picked


def _definition(q: Tensor, k: Tensor, v: Tensor, picked: Tensor) -> Tensor:
    share = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(share, 1).mT * q.shape[3] ** -0.5
    weights = scores.masked_fill(~picked, -math.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v.repeat_interleave(share, 1)


MASKS = {
    "full": lambda n: masks.Full(),
    "causal": lambda n: masks.Causal(),
    "packed": lambda n: masks.Documents([11, 1, n - 12]) & masks.Causal(),
    "padded": lambda n: masks.Causal() & masks.Padding([n, n - 9]),
    "window and sink": lambda n: masks.streaming(3, 9),
    "function": lambda n: masks.Predicate(lambda b, h, q, kv: (kv <= q) & ((q + kv + b) % 3 != 0)),
    "nothing": lambda n: ~masks.Full(),
}
KERNELS: dict[str, str | Kernel] = {"by block": ByBlock(), "gathered": Gathered(), "tiled": "tiled"}


@pytest.mark.parametrize("view", ["the keys", "first channels", "last channels", "other rows", "other width"])
def test_gathered_values_may_share_memory_with_the_keys(view: str) -> None:
    n, shape = 12, (2, 2, 12, 5)
    memory = torch.randn(2, 2, n, 8, dtype=TORCH)
    key = memory[..., :5]
    value = {
        "the keys": key,
        "first channels": memory[..., :3],
        "last channels": memory[..., 3:],
        "other rows": memory.as_strided(shape, (2 * n * 8, n * 8, 5, 1)),
        "other width": memory,
    }[view]
    matrix = mechanisms.TopK(DotProducts(), 3)(torch.randn(shape, dtype=TORCH), key, mask=masks.Causal())
    matrix.impl = Gathered()
    torch.testing.assert_close(matrix @ value, matrix.to_dense() @ value.clone())


def test_index_heads_are_scored_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [torch.randn(2, 7, 6, 4), torch.randn(2, 1, 9, 4), torch.randn(2, 7, 6)]
    indexer = LightningIndexer(*leaves)
    products = torch.einsum("bhqd,bkd->bhqk", leaves[0], leaves[1][:, 0]).relu()
    expected = torch.einsum("bhqk,bhq->bqk", products, leaves[2])[:, None] * (7 * 4) ** -0.5
    for limit in (1, 2 * 6 * 9 * 3, 1 << 18):  # one head, three, and all
        monkeypatch.setattr("saccade.scorers.key_scorers._SCORES", limit)
        torch.testing.assert_close(indexer.scores(range(6), 9), expected)
        torch.testing.assert_close(indexer.scores(range(2, 5), 7), expected[:, :, 2:5, :7])


@pytest.mark.ci
@pytest.mark.parametrize("sharing", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", sampled(MASKS, 3))
def test_products_and_gradients_are_those_of_the_dense_definition(name: str, size: int, sharing: int) -> None:
    n, heads = 30, 4
    mask = MASKS[name](n)
    leaves = [torch.randn(2, h, n, 5, dtype=TORCH, requires_grad=True) for h in (heads, 2, 2)]
    q, k, v = leaves
    scores = torch.randn(2, sharing, n, -(-n // size))
    allowed = mask.to_dense(n, batch=2, heads=heads)
    picked = _chosen(scores.repeat_interleave(heads // sharing, 1), allowed, 3, size)
    expected = _definition(q, k, v, picked)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, weight)
    top = mechanisms.TopK(lambda q, k, rows: scores[:, :, rows.start : rows.stop], 3, size)
    matrix = top(q, k, mask=mask)
    torch.testing.assert_close(matrix.to_dense() > 0, picked)
    x = torch.randn(2, heads, n, 2, dtype=TORCH)
    torch.testing.assert_close(matrix.mT @ x, matrix.to_dense().mT @ x)
    for impl in KERNELS.values():
        matrix.impl = impl
        own = matrix @ v
        torch.testing.assert_close(own, expected)
        torch.testing.assert_close(torch.autograd.grad(own, leaves, weight), gradients)


@pytest.mark.parametrize("options", [{"dropout_p": 0.3, "seed": 5}, {}], ids=["dropout", "plain"])
@pytest.mark.parametrize("positions", [None, [[-1, -1, *range(18)], [*range(20)]]], ids=["in order", "ragged"])
def test_kernels_agree_with_softcap_sink_and_dropout(
    positions: list[list[int]] | None, options: dict[str, float]
) -> None:
    leaves = [torch.randn(2, h, 20, 4, dtype=TORCH, requires_grad=True) for h in (4, 2, 2)]
    softmax = mechanisms.Softmax(softcap=1.5, sink_logit=4).double()
    top = mechanisms.TopK(DotProducts(), 2, 4, softmax=softmax)
    where = {} if positions is None else {"q_positions": positions, "kv_positions": positions}
    matrix, found = top(*leaves[:2], mask=masks.Causal(), **where), []
    for impl in KERNELS.values():
        matrix.impl = impl
        out = matrix.matmul(leaves[2], **options)
        found.append((out, matrix.lse, *torch.autograd.grad(out.square().sum() + matrix.lse.exp().sum(), leaves)))
    for others in found[1:]:
        torch.testing.assert_close(found[0], others)


def test_a_bias_goes_with_the_chosen_keys() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 4, dtype=TORCH)
    bias = torch.randn(1, 2, 20, 20, dtype=TORCH)
    matrix = mechanisms.TopK(DotProducts(), 2, 4).with_bias(bias)(q, k, mask=masks.Causal())
    plain = mechanisms.TopK(DotProducts(), 2, 4)(q, k, mask=masks.Causal()).to_dense() > 0
    scores = (q @ k.mT / 2 + bias).masked_fill(~plain, -math.inf)
    torch.testing.assert_close(matrix @ v, scores.softmax(-1) @ v)


@pytest.mark.parametrize("scorer", [BlockMeans(), BlockBounds()], ids=repr)
def test_block_scorers_rank_by_the_keys_of_each_block_and_select_the_block_of_the_query(scorer: Scorer) -> None:
    q, key = torch.randn(2, 4, 7, 3, dtype=TORCH), torch.randn(2, 2, 11, 3, dtype=TORCH)
    score = scorer.on(q, key, 4)
    found = score(range(2, 7), 11)
    for b, h, row, block in itertools.product(range(2), range(4), range(5), range(3)):
        if (row + 2 + 4) // 4 == block:
            assert found[b, h, row, block] == math.inf
            continue
        keys = key[b, h // 2, block * 4 : block * 4 + 4]
        exact = keys @ q[b, h, row + 2]
        if isinstance(scorer, BlockMeans):
            torch.testing.assert_close(found[b, h, row, block], exact.mean())
        else:
            channels = torch.stack([keys.amin(0), keys.amax(0)]) * q[b, h, row + 2]
            torch.testing.assert_close(found[b, h, row, block], channels.amax(0).sum())
            assert found[b, h, row, block] >= exact.max()
    torch.testing.assert_close(score(range(2, 7), 8), found[..., :2])


@pytest.mark.parametrize("scorer", [DotProducts(), BlockMeans(), BlockBounds()], ids=repr)
@pytest.mark.parametrize(("k", "size"), [(20, 1), (5, 4), (7, 3)])
def test_as_many_as_there_are_is_exact_softmax(scorer: Scorer, k: int, size: int) -> None:
    q, key, v = torch.randn(3, 1, 2, 20, 4)
    own = mechanisms.TopK(scorer, k, size)(q, key, mask=masks.Causal())
    full = mechanisms.Softmax()(q, key, mask=masks.Causal())
    assert own.explain().kernel == full.explain().kernel
    torch.testing.assert_close(own @ v, full @ v)


def test_ties_choose_the_first_keys_at_any_length() -> None:
    scores = torch.randint(0, 3, (200, 40)).float()
    for k in (1, 5, 39):
        expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
        torch.testing.assert_close(stable_topk(scores, k).sort(-1).values, expected)
    wide = torch.cat([scores, torch.full((200, 30), -1.0)], 1)
    torch.testing.assert_close(stable_topk(wide, 5).sort(-1).values, stable_topk(scores, 5).sort(-1).values)


@pytest.mark.parametrize("scorer", [BlockMeans(), BlockBounds()], ids=repr)
def test_a_cache_selects_the_blocks_of_the_full_run(scorer: Scorer) -> None:
    top, (q, k, v) = mechanisms.TopK(scorer, 3, 4), torch.randn(3, 2, 4, 45, 8)
    full, cache = top(q, k, mask=masks.Causal()) @ v, top.new_cache()
    edges = [0, 13, 14, 15, 16, 17, 30, 45]
    parts = [slice(i, j) for i, j in itertools.pairwise(edges)]
    out = [cache.attend(top, q[:, :, own], k[:, :, own], v[:, :, own], mask=masks.Causal()) for own in parts]
    torch.testing.assert_close(torch.cat(out, 2), full)


def test_a_ragged_batch_of_tokens_is_each_item_alone() -> None:
    top, (q, k, v) = mechanisms.TopK(DotProducts(), 4), torch.randn(3, 2, 2, 20, 8)
    where = torch.stack([torch.arange(20), torch.arange(20) - 6]).clamp(min=-1)
    own = top(q, k, mask=masks.Causal(), q_positions=where, kv_positions=where) @ v
    alone = top(q[1:, :, 6:], k[1:, :, 6:], mask=masks.Causal()) @ v[1:, :, 6:]
    torch.testing.assert_close(own[1:, :, 6:], alone)
    assert not own[1, :, :6].any()


def test_packed_tokens_are_each_text_alone() -> None:
    top, (q, k, v) = mechanisms.TopK(DotProducts(), 4), torch.randn(3, 1, 2, 20, 8)
    packed = top(q, k, mask=masks.Documents([12, 8]) & masks.Causal()) @ v
    for own in (slice(0, 12), slice(12, 20)):
        torch.testing.assert_close(
            packed[:, :, own], top(q[:, :, own], k[:, :, own], mask=masks.Causal()) @ v[:, :, own]
        )


def test_a_nan_stays_where_it_is_read() -> None:
    q, k, v = torch.randn(3, 1, 1, 40, 4)
    matrix = mechanisms.TopK(BlockMeans(), 2, 4)(q, k, mask=masks.Causal())
    read = matrix.to_dense()[0, 0, :, 9] > 0
    spoilt = v.clone()
    spoilt[0, 0, 9] = math.nan
    for impl in KERNELS.values():
        matrix.impl = impl
        assert torch.equal((matrix @ spoilt)[0, 0].isnan().any(-1), read)


@pytest.mark.ci
def test_compiled_programs_break_where_keys_are_chosen() -> None:
    torch.compiler.reset()
    q, k, v = torch.randn(3, 1, 2, 64, 4)
    for size in (1, 16):
        top = mechanisms.TopK(BlockMeans(), 2, size)
        program = torch.compile(
            lambda q, k, v, top=top: top(q, k, mask=masks.Causal()).matmul(v).sin(), backend="eager"
        )
        torch.testing.assert_close(program(q, k, v), (top(q, k, mask=masks.Causal()) @ v).sin())


def test_chosen_keys_are_reported_and_moved() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 4)
    matrix = mechanisms.TopK(BlockMeans(), 2, 16)(q, k, mask=masks.Causal())
    assert "at most 2 blocks of 16 keys" in str(matrix.explain())
    assert matrix.explain().kernel == "by_block"
    assert isinstance(matrix.inputs.rule, SelectedBlocks)
    torch.testing.assert_close((matrix.to(torch.float64) @ v.double()).float(), matrix @ v)
    assert mechanisms.TopK(BlockMeans(), 2, 16).new_cache().length == 0


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: mechanisms.TopK(3, 2), TypeError, "scorer must be a Scorer or a function"),
        (lambda: mechanisms.TopK(BlockMeans, 2), TypeError, "scorer must be a Scorer or a function"),
        (mechanisms.TopK, TypeError, "TopK: k must be given; got nothing"),
        (lambda: mechanisms.TopK(BlockMeans()), TypeError, "TopK: k must be given; got nothing"),
        (lambda: mechanisms.TopK(0), ValueError, "k must be"),
        (lambda: mechanisms.TopK(BlockMeans(), 0), ValueError, "k must be"),
        (lambda: mechanisms.TopK(BlockMeans(), 1, 0), ValueError, "block_size must be"),
        (lambda: mechanisms.TopK(BlockMeans(), 1, softmax=mechanisms.Linear()), TypeError, "softmax must be"),
        (lambda: LightningIndexer(*torch.ones(2, 1, 3, 4, 4), torch.ones(1, 3, 4)), ValueError, "index_key must have"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(make: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_values_hidden_by_vmap_are_refused() -> None:
    q = torch.randn(3, 1, 2, 12, 4)
    with pytest.raises(UnsupportedError, match="vmap hides them"):
        torch.func.vmap(lambda q: mechanisms.TopK(BlockMeans(), 2, 4)(q, q).matmul(q))(q)


def test_scores_of_another_shape_are_refused() -> None:
    q = k = torch.randn(1, 2, 12, 4)
    with pytest.raises(ValueError, match="scores must be"):
        mechanisms.TopK(lambda q, k, rows: torch.zeros(1, 1, len(rows), 7), 2, 4)(q, k)
    index = LightningIndexer(torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match="index tensors must hold 1 items, 12 queries and 12 keys"):
        mechanisms.TopK(index, 2)(q, k)


def test_dot_products_select_unless_another_score_does() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 9, 4)
    expected = mechanisms.TopK(DotProducts(), 3)(q, k, mask=masks.Causal()).to_dense()
    for top in (mechanisms.TopK(3), mechanisms.TopK(k=3), mechanisms.TopK(None, 3)):
        torch.testing.assert_close(top(q, k, mask=masks.Causal()).to_dense(), expected, rtol=0, atol=0)
