"""A prompt read sparsely is what its tokens read one by one."""

import itertools
import math

import pytest
import torch

from saccade import masks
from saccade.caches import BlockSelectCache, load_cache, save_cache
from saccade.caches.block_select import log_shares
from saccade.mechanisms import Linear, Softmax
from saccade.scorers import BlockBounds, BlockMeans
from saccade.support.errors import UnsupportedError

CAUSAL = masks.Causal()


def _run(cache, tensors, edges, softmax):
    parts = [slice(i, j) for i, j in itertools.pairwise(edges)]
    out = [cache.attend(softmax, *(x[:, :, own] for x in tensors), mask=CAUSAL) for own in parts]
    return torch.cat(out, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scorer", [BlockMeans(), BlockBounds()], ids=repr)
@pytest.mark.parametrize("ends", [(1, 2), (0, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("cuts", [(), (30,), (7, 21, 22, 23, 40, 61)], ids=str)
def test_any_split_is_one_token_at_a_time(cuts, ends, scorer, kv_heads):
    n, dtype = 70, torch.float64
    tensors = [torch.randn(2, h, n, 4, dtype=dtype) for h in (4, kv_heads, kv_heads)]
    settings = {"scorer": scorer, "sink_blocks": ends[0], "local_blocks": ends[1]}
    dense, sparse = BlockSelectCache(4, 20, **settings), BlockSelectCache(4, 20, prompt="sparse", **settings)
    softmax = Softmax(softcap=2.0)
    expected = _run(dense, tensors, range(n + 1), softmax)
    own = _run(sparse, tensors, [0, *cuts, n], softmax)
    torch.testing.assert_close(own, expected)
    assert sparse.exact_len == dense.exact_len == 20
    torch.testing.assert_close(sparse.summary, dense.summary[:, :, : n // 4])


@pytest.mark.parametrize("rows", [1, 7])
def test_blocks_are_chosen_for_a_few_tokens_at_a_time(monkeypatch, rows):
    tensors = [torch.randn(2, h, 70, 4, dtype=torch.float64) for h in (4, 2, 2)]
    expected = _run(BlockSelectCache(4, 20, prompt="sparse"), tensors, [0, 33, 70], Softmax())
    monkeypatch.setattr("saccade.caches.block_select._ENTRIES", rows * 2 * 4 * 17 + 5)
    own = _run(BlockSelectCache(4, 20, prompt="sparse"), tensors, [0, 33, 70], Softmax())
    torch.testing.assert_close(own, expected)


def test_ties_read_the_first_blocks_in_prompts_and_steps():
    q, k, v = torch.zeros(1, 2, 60, 4), *torch.randn(2, 1, 2, 60, 4)
    runs = [
        _run(BlockSelectCache(4, 20, prompt="sparse"), (q, k, v), edges, Softmax()) for edges in ([0, 60], range(61))
    ]
    torch.testing.assert_close(*runs)


class _Narrow(BlockMeans):
    def score(self, query, summary):
        return super().score(query, summary).bfloat16()


def test_scores_of_a_narrow_type_are_log_shares_one_another_in_a_wide_one():
    q, k, v = (torch.randn(2, heads, 60, 4) for heads in (4, 2, 2))
    q[..., 0], k[..., 0], k[:, :, 20:24, 0] = 10.0, 0.0, 300.0  # beside one block's score, others differ by little
    runs = [
        _run(BlockSelectCache(4, 20, prompt="sparse", scorer=_Narrow()), (q, k, v), edges, Softmax(scale=1e-3))
        for edges in ([0, 60], range(61))
    ]
    torch.testing.assert_close(*runs)


INF = float("inf")


@pytest.mark.parametrize(
    "scores, ranks",
    [
        ([0.0, 1.0, -INF], [0, 1, -INF]),
        ([float("nan"), 1.0, 2.0, -INF], [INF, 1, 2, -INF]),
        ([float("nan"), -INF, -INF], [INF, -INF, -INF]),
        ([float("nan"), float("nan")], [INF, INF]),
        ([-INF, -INF], [-INF, -INF]),
    ],
    ids=str,
)
def test_scores_are_log_shares_one_another(scores, ranks):
    finite = [x for x in ranks if abs(x) != INF]
    total = math.log(sum(math.exp(x) for x in finite)) if finite else 0.0
    expected = torch.tensor([[x - total for x in ranks], [0.0] * len(ranks)])
    expected[1] = -math.log(len(ranks))  # another row is as if alone
    torch.testing.assert_close(log_shares(torch.tensor([scores, [5.0] * len(ranks)])), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_means_and_products_are_taken_in_a_wide_type(dtype):
    wide, scorer = torch.float64 if dtype == torch.float64 else torch.float32, BlockMeans()
    key = torch.full((1, 1, 1, 128, 2), 1000.0, dtype=dtype)  # whose sum is no float16
    summary = scorer.summarize(key, torch.ones(1, 1, 1, 128, 1, dtype=torch.bool))
    assert torch.equal(summary, torch.full((1, 1, 1, 2), 1000.0, dtype=dtype))
    assert torch.equal(scorer.score(summary[:, :, 0], summary), torch.full((1, 1, 1), 2e6, dtype=wide))
    half = (3 * torch.randn(1, 1, 1, 128, 2)).to(dtype)
    mean = (half.to(wide).sum(3) / 128).to(dtype)
    assert torch.equal(scorer.summarize(half, torch.ones(1, 1, 1, 128, 1, dtype=torch.bool)), mean)


def test_gradients_reach_the_prompt():
    leaves = [torch.randn(1, 2, 40, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = _run(BlockSelectCache(4, 12, prompt="sparse"), leaves, [0, 40], Softmax())
    assert all(x.isfinite().all() and x.any() for x in torch.autograd.grad(out.sum(), leaves))


def test_it_is_saved(tmp_path):
    tensors = torch.randn(3, 1, 2, 40, 4)
    cache = BlockSelectCache(4, 12, prompt="sparse")
    _run(cache, tensors, [0, 30], Softmax())
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors")
    assert loaded.prompt == "sparse"
    rest = tensors[:, :, :, 30:]
    torch.testing.assert_close(*(_run(own, rest, [0, 10], Softmax()) for own in (cache, loaded)))


def test_unsupported_arguments_are_refused():
    q = torch.randn(2, 2, 30, 4)
    cache = BlockSelectCache(4, 12, prompt="sparse")
    with pytest.raises(UnsupportedError, match=r"its mask is not masks.Causal\(\)"):
        cache.attend(Softmax(), q, q, q)
    where = torch.stack([torch.arange(30), torch.arange(30) - 3]).clamp(min=-1)
    with pytest.raises(UnsupportedError, match="it has padding"):
        cache.attend(Softmax(), q, q, q, mask=CAUSAL, positions=where)
    with pytest.raises(UnsupportedError, match="is not a softmax"):
        cache.attend(Linear(), q, q, q, mask=CAUSAL)
    assert cache.length == 0
    with pytest.raises(ValueError, match="rescore_every must be 1"):
        BlockSelectCache(4, 12, prompt="sparse", rescore_every=2)
    with pytest.raises(ValueError, match="prompt must be"):
        BlockSelectCache(4, 12, prompt="some")
