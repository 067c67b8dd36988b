"""Tests of dropout: the rate is right, tilings do not matter, and the matrix itself is unchanged."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.engine import dropout


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_the_rate_and_the_independence_of_rows_columns_and_neighbours(p: float) -> None:
    n = 512
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.arange(4)[None, :, None, None]
    at = torch.arange(n)
    kept = dropout.keep(7, b, h, at[None, None, :, None], at[None, None, None, :], p).double()[0]
    spread = (p * (1 - p)) ** 0.5
    z = (kept - (1 - p)) / spread
    assert abs(z.mean()) * z.numel() ** 0.5 < 4
    for axis in (1, 2):  # means of rows and columns vary as those of independent draws
        assert abs(z.mean(axis).var() * n - 1) < 0.15
    for other in (z.roll(1, 1), z.roll(1, 2), z.roll(1, 0)):  # neighbours and heads do not know of each other
        assert abs((z * other).mean()) * z.numel() ** 0.5 < 4
    assert torch.linalg.matrix_norm(z, 2).max() < 1.1 * 2 * n**0.5  # no hidden structure: a random matrix's norm


def _mixed(x: int) -> int:
    """Return Murmur3's finaliser of a word of 32 bits."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def _word(seed: int, place: tuple[int, ...]) -> int:
    """Return the hash, from 0 to 2**32 - 1, in plain integers: the dropped weights never change between versions."""
    b, h, q, kv = (x % 2**32 for x in place)
    low, high = seed % 2**32, seed // 2**32
    row = _mixed(_mixed(_mixed(_mixed(low ^ _mixed(high)) ^ b) ^ h) ^ q)
    column = _mixed(_mixed(low ^ 0x9E3779B9) ^ kv)
    word = (row ^ column) * (row | 1) % 2**32
    return (word - 2**32 if word >= 2**31 else word) + 2**31


@pytest.mark.parametrize("seed", [0, 5, 2**32 + 5, 2**40 + 2**31, 2**63 - 1])
@pytest.mark.parametrize("p", [0.0, 0.25, 0.9])
def test_kept_weights_are_a_hash_of_seed_and_position(seed: int, p: float) -> None:
    sizes = (2, 3, 5, 7)
    first = (0, 1, 2**32 - 2, -1)
    b, h, q, kv = torch.meshgrid(
        *(torch.arange(n) + start for n, start in zip(sizes, first, strict=True)), indexing="ij"
    )
    want = [
        _word(seed, place) >= int(p * 2**32)
        for place in zip(*(x.flatten().tolist() for x in (b, h, q, kv)), strict=True)
    ]
    axes = (b[:, :1, :1, :1], h[:1, :, :1, :1], q[:1, :1, :, :1], kv[:1, :1, :1])
    assert dropout.keep(seed, *axes, p).flatten().tolist() == want
    words = dropout.Words(seed, *axes, p)
    part = (slice(0, 2), slice(1, 3), range(0, 5, 2), (range(1, 3), range(4, 7)))
    some = torch.tensor(want).view(sizes)[:, 1:, ::2, [1, 2, 4, 5, 6]]
    for dtype in (torch.float32, torch.float64):
        weights = torch.rand(some.shape, dtype=dtype) + 0.5
        own = words.block(*part, out=torch.empty(some.shape, dtype=torch.int32))
        assert torch.equal(dropout.dropped(weights, own, out=torch.empty_like(weights)), weights * some)
        assert torch.equal(dropout.drop_(weights.clone(), own), weights * some)


@pytest.mark.parametrize("key", range(4))
def test_the_least_word_that_is_kept(key: int) -> None:
    place = (1, 0, 2, key)
    axes = [torch.full((1, 1, 1, 1), x) for x in place]
    share = _word(5, place) / 2**32
    assert dropout.keep(5, *axes, share).item()
    assert not dropout.keep(5, *axes, share + 2**-32).item()


def test_words_of_items_that_stand_apart_are_their_own() -> None:
    q, kv = torch.tensor([[3, 4], [0, 9]])[:, None, :, None], torch.tensor([[1, 2, 3], [4, 5, 6]])[:, None, None]
    b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[None, :, None, None]
    words = dropout.Words(8, b, h, q, kv, 0.5)
    out = torch.empty(1, 2, 2, 3, dtype=torch.int32)
    for item in range(2):
        own = words.block(slice(item, item + 1), slice(0, 2), range(2), (range(3),), out=out)
        assert torch.equal(own[0] != 0, dropout.keep(8, b, h, q, kv, 0.5)[item])


@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(3, 3), masks.Documents([5, 9, 6])], ids=str)
def test_kernel_and_blocks_drop_the_same_weights(mask: masks.Mask | None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(2, 4, 20, 8, dtype=torch.float64), torch.randn(2, 2, 20, 8, dtype=torch.float64)
    v = torch.randn(2, 2, 20, 6, dtype=torch.float64)
    matrix = sc.AttentionMatrix(q, k, mask)
    whole = matrix.matmul(v, dropout_p=0.3, seed=5)
    torch.testing.assert_close(sc.Matrix.matmul(matrix, v, dropout_p=0.3, seed=5), whole)
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", 64)
    torch.testing.assert_close(sc.Matrix.matmul(matrix, v, dropout_p=0.3, seed=5), whole)
    assert not torch.equal(matrix.matmul(v, dropout_p=0.3, seed=6), whole)


@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_kept_weights_are_scaled_forward_and_backward(impl: str) -> None:
    query, key, value = (torch.randn(2, 3, 7, 4, dtype=torch.float64) for _ in range(3))
    axes = torch.meshgrid(*(torch.arange(n) for n in (2, 3, 7, 7)), indexing="ij")
    kept = dropout.keep(5, *axes, 0.3) / 0.7
    upstream, found = torch.randn_like(value), []
    for own in (False, True):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        q, k, v = leaves
        if own:
            out = sc.AttentionMatrix(q, k, impl=impl).matmul(v, dropout_p=0.3, seed=5)
        else:
            out = ((q @ k.mT / 2.0).softmax(-1) * kept) @ v
        found.append((out.detach(), *torch.autograd.grad(out, leaves, upstream)))
    torch.testing.assert_close(found[1], found[0])
    plain = sc.AttentionMatrix(query, key, impl=impl).matmul(value, dropout_p=0.3, seed=5)
    torch.testing.assert_close(plain, found[0][0])


def test_a_slice_of_the_sequence_drops_what_the_whole_drops() -> None:
    q, k, v = (torch.randn(1, 2, 16, 8, dtype=torch.float64) for _ in range(3))
    whole = sc.AttentionMatrix(q, k).matmul(v, dropout_p=0.4, seed=3)
    some = torch.tensor([3, 4, 11])
    part = sc.AttentionMatrix(q[:, :, some], k, q_positions=some, kv_positions=range(16))
    torch.testing.assert_close(part.matmul(v, dropout_p=0.4, seed=3), whole[:, :, some])


def test_torch_s_generator_makes_it_repeatable_and_the_matrix_is_untouched() -> None:
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(sc.attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    dense = sc.AttentionMatrix(q, k).to_dense()
    torch.testing.assert_close(dense.sum(-1), torch.ones(1, 2, 16))


def test_seeds_are_drawn_evenly_from_torch_s_generator() -> None:
    """A manual seed gives the same dropout seed in every version."""
    for start in range(20):
        torch.manual_seed(start)
        own = dropout.draw_seed()
        torch.manual_seed(start)
        assert own == int(torch.randint(2**31, ()))


@pytest.mark.ci
def test_its_mean_is_the_product_without_dropout() -> None:
    q, k, v = (torch.randn(1, 1, 8, 4, dtype=torch.float64) for _ in range(3))
    matrix = sc.AttentionMatrix(q, k)
    draws = torch.stack([matrix.matmul(v, dropout_p=0.3, seed=seed) for seed in range(2000)])
    standard_error = draws.std(0) / 2000**0.5
    assert ((draws.mean(0) - matrix @ v).abs() < 5 * standard_error).all()


@pytest.mark.usefixtures("without_native")
def test_explain_says_why_the_fused_kernel_does_not_run() -> None:
    q = torch.randn(1, 1, 8, 4)
    explanation = sc.AttentionMatrix(q, q).explain(dropout_p=0.1)
    assert explanation.kernel == "tiled"
    assert explanation.skipped["fused"] == ("it has no dropout",)


@pytest.mark.parametrize(
    "seed, error", [("a", TypeError), (2.5, TypeError), ([1], TypeError), (True, TypeError), (-1, ValueError)]
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("product", [sc.AttentionMatrix.matmul, sc.Matrix.matmul], ids=["kernels", "blocks"])
def test_a_wrong_seed_is_refused(
    product: Callable[..., Tensor], dropout_p: float, seed: object, error: type[Exception]
) -> None:
    x = torch.zeros(1, 1, 3, 4)
    with pytest.raises(error, match=r"seed must be an int from 0 to 2\*\*63 - 1, or None; got"):
        product(sc.AttentionMatrix(x, x), x, dropout_p=dropout_p, seed=seed)


@pytest.mark.parametrize("product", [sc.AttentionMatrix.matmul, sc.Matrix.matmul], ids=["kernels", "blocks"])
def test_seeds_that_would_be_the_same_one_are_refused(product: Callable[..., Tensor]) -> None:
    x = torch.zeros(1, 1, 3, 4)
    for seed in (2**63, 2**64 + 5):
        with pytest.raises(ValueError, match=f"seed must be .*; got {seed}"):
            product(sc.AttentionMatrix(x, x), x, dropout_p=0.5, seed=seed)
    for seed in (0, 2**63 - 1):
        assert product(sc.AttentionMatrix(x, x), x, dropout_p=0.5, seed=seed).isfinite().all()


@pytest.mark.parametrize("dropout_p", [None, [], "", (), {}, "0", True, False])
def test_a_wrong_probability_is_refused(dropout_p: object) -> None:
    x = torch.zeros(1, 1, 3, 4)
    with pytest.raises(TypeError, match="attention: dropout_p must be a float; got"):
        sc.attention(x, x, x, dropout_p=dropout_p)
    with pytest.raises(TypeError, match=r"AttentionMatrix\.matmul: dropout_p must be a float; got"):
        sc.AttentionMatrix(x, x).matmul(x, dropout_p=dropout_p)
    with pytest.raises(TypeError, match=r"AttentionMatrix.explain: dropout_p must be a float; got"):
        sc.AttentionMatrix(x, x).explain(dropout_p=dropout_p)


@pytest.mark.parametrize("dropout_p", [10**400, float("nan"), -0.1, 1])
def test_a_probability_of_one_is_refused(dropout_p: float) -> None:
    x = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="attention: dropout_p must be at least 0 and below 1; got"):
        sc.attention(x, x, x, dropout_p=dropout_p)
