"""Claims about the cost of attention, Linformer and Performer, measured in operations and bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from saccade.masks import Causal, Full, Global, Mask, Strided, Window
from saccade.matrix import AttentionMatrix, attention
from saccade.mechanisms import Linear, Linformer, Mechanism, Performer
from saccade.mechanisms.linformer import LinformerMatrix
from saccade.support.language import Message
from saccade.testing.largest_tensor import largest_tensor
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal, same

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function that computes attention from query, key and value."""

_WINDOW = Window(64, 64)


def flops(compute: Callable[[], object]) -> int:
    """Count the floating-point operations of all matrix products in a computation, two for each multiply-add."""
    with FlopCounterMode(display=False) as counter:
        compute()
    return int(counter.get_total_flops())


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute softmax attention without a mask, storing the full matrix of weights."""
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


def recurrence(x: Tensor) -> Tensor:
    """Run a recurrent network with tanh. For each token, it multiplies the state and the input by a d × d matrix."""
    state, weight = x.new_zeros(x.shape[0], 1, x.shape[-1]), x.new_zeros(x.shape[-1], x.shape[-1])
    for step in range(x.shape[2]):
        state = torch.tanh(state @ weight + x[:, 0, step : step + 1] @ weight)
    return state


def growth(count: Callable[[int], float], length: int) -> float:
    """Return the factor by which a cost grows when its argument, such as the sequence length, doubles."""
    return count(2 * length) / count(length)


def _on_meta(length: int, width: int = 64) -> Tensor:
    return torch.empty(1, 1, length, width, device="meta")


def _zeros(length: int) -> Tensor:
    return torch.zeros(1, 1, length, 16)


def _cost_by_length(
    attend: Attend, count: Callable[[Callable[[], object]], int] = flops, make_input: Callable[[int], Tensor] = _on_meta
) -> Callable[[int], int]:
    """Return a function that maps a length to the cost of self-attention at that length."""

    def of(length: int) -> int:
        x = make_input(length)
        return count(lambda: attend(x, x, x))

    return of


def attention_layer(x: Tensor) -> Tensor:
    """Run a self-attention layer with all its matrix products, including the input and output projections."""
    weight = x.new_zeros(x.shape[-1], x.shape[-1])
    return dense(x @ weight, x @ weight, x @ weight) @ weight


def transformer_layer(x: Tensor, widening: int = 4) -> Tensor:
    """Run the matrix products of attention and of a feed-forward network ``widening`` times as wide."""
    wide = x.new_zeros(x.shape[-1], widening * x.shape[-1])
    attended = attention_layer(x)
    return torch.relu(attended @ wide) @ wide.mT if widening else attended


@claim(
    latex=r"2n^2(d_k+d_v)",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, table 1",
    verdict="holds if",
    conditions="every query may attend to every key, and only the products of queries, keys and values are counted. "
    "From n = d to n = 2 d, the operations of a layer with projections grow 2.67 times, and with a feed-forward "
    "network of width 4 d as well 2.29 times; the n² part is half of such a layer at n = 6 d. The weights need not be "
    "stored",
)
def operations_are_quadratic(
    draw: Draw, *, attend: Attend = dense, layer: Callable[[Tensor, int], Tensor] = transformer_layer
) -> Measurements:
    """Exact attention takes O(n² d) operations: doubling the length quadruples them."""
    count = _cost_by_length(attend)
    yield equal("operations, n = 1,024, d = 64, against 2 n² (d + d)", count(1024), 4 * 1024**2 * 64)
    yield equal("growth for twice the length", growth(count, 1024), 4.0)
    x = torch.zeros(1, 1, 256, 64)
    tiled = flops(lambda: attention(x, x, x, impl="tiled"))
    yield equal("operations of a tiled kernel, as a multiple of dense, n = 256", tiled / count(256), 1.0)
    width = 64

    def whole(widening: int) -> Callable[[int], int]:
        return lambda length: flops(lambda: layer(_on_meta(length, width), widening))

    yield equal("with projections, n = d: growth for twice the length", growth(whole(0), width), 8 / 3)
    yield equal("with a feed-forward network of 4 d too, n = d: growth", growth(whole(4), width), 16 / 7)
    share = _cost_by_length(dense)(6 * width) / whole(4)(6 * width)
    yield equal("the same, n = 6 d: share of the operations that grow as n²", share, 0.5)


@claim(
    latex=r"O(n^2d)\ \text{is linear}",
    source='a table of a tutorial, under "linear complexity"; against it Keles et al. 2023, arXiv:2209.04881',
    verdict="refuted",
    conditions="windows, O(n·w·d), and linear attention, O(n·m·d), are linear in n, but neither is the same function; "
    "the memory of exact attention is also linear in n",
)
def standard_attention_is_linear(
    draw: Draw, *, attend: Attend = dense, near: Mask = _WINDOW, other: Callable[[], Mechanism] = Linear
) -> Measurements:
    """Standard attention has linear complexity."""
    yield apart("growth of the operations for twice the length", growth(_cost_by_length(attend), 2048), 2.0, 1.5)

    def windowed(length: int) -> int:
        return AttentionMatrix(_on_meta(length), _on_meta(length), near).explain().flops

    linear = _cost_by_length(lambda query, key, value: other()(query, key) @ value, make_input=_zeros)
    yield equal("a window of 64 on each side: growth", growth(windowed, 16384), 2.0, 0.02, "the ends")
    yield equal("linear attention: growth", growth(linear, 512), 2.0, 0.02, "the ends")


def operations_of_a_mask(mask: Mask, length: int) -> int:
    """Count the operations of attention with a head of width 64, for the pairs that a mask allows."""
    return AttentionMatrix(_on_meta(length), _on_meta(length), mask).explain().flops


def operations_of_the_best(keys: int, length: int) -> int:
    """Count the operations of attention to the ``keys`` highest-scoring keys, for a head of width 64.

    The scores of all keys are computed first, and they count as well.
    """
    x, selected = _on_meta(length), _on_meta(length, keys)
    return flops(lambda: (x @ x.mT, selected @ x[:, :, :keys]))


@claim(
    latex=r"O(n\,k\,d)\ \text{for}\ k\ \text{keys per query}",
    source="tutorials; Child et al. 2019, arXiv:1904.10509, section 4, for strides of √n; Beltagy et al. 2020, "
    "arXiv:2004.05150, section 3.1, for global tokens",
    verdict="holds if",
    conditions="the pattern is known before the scores and the number of keys per query is bounded: a window takes "
    "O(n w), a window with g global tokens O(n (w + g)). To choose the keys with the highest scores, all n² scores "
    "are computed first; every s-th key takes n²/s, which is still quadratic for fixed s (n√n for s = √n), as are "
    "global tokens whose number is proportional to n. A dense matrix with a mask saves nothing",
)
def sparse_attention_is_cheaper(
    draw: Draw,
    *,
    masked: Callable[[Mask, int], int] = operations_of_a_mask,
    best: Callable[[int, int], int] = operations_of_the_best,
) -> Measurements:
    """Sparse attention computes only some pairs, which is cheaper than O(n²)."""

    def grown(mask: Callable[[int], Mask], length: int = 4096) -> float:
        return growth(lambda n: masked(mask(n), n), length)

    yield equal("a window of 64 on each side: growth", grown(lambda n: _WINDOW, 16384), 2.0, 0.02, "the ends")
    few = grown(lambda n: _WINDOW | Global(range(4)), 16384)
    yield equal("a window and 4 global tokens: growth", few, 2.0, 0.02, "the ends")
    many = grown(lambda n: _WINDOW | Global(range(n // 8)))
    yield at_least("a window and n/8 global tokens: growth", many, 3.5)
    yield at_least("the keys of the 8 highest scores: growth", growth(lambda n: best(8, n), 4096), 3.5)
    yield equal("every 8th key: growth", grown(lambda n: Strided(8)), 4.0, 0.02, "the ends")
    yield equal(
        "every 8th key: operations, over those of all keys", masked(Strided(8), 4096) / masked(Full(), 4096), 1 / 8
    )
    yield equal(
        "every √n-th key, four times the length: growth", masked(Strided(128), 16384) / masked(Strided(64), 4096), 8
    )


@claim(
    latex=r"n^2\ \text{weights}",
    source="tutorials; against it Rabe and Staats 2021, arXiv:2112.05682, and Dao et al. 2022, arXiv:2205.14135",
    verdict="holds if",
    conditions="the weights are stored: exact attention needs only a few tiles of them at a time. n² is the number "
    "for one head of one layer; h heads store h n². For an image in patches, n grows with the square of the side, and "
    "the number of weights with its fourth power",
)
def memory_is_quadratic(draw: Draw, *, attend: Attend = attention, stores: Attend = dense) -> Measurements:
    """Attention needs memory for n² weights."""
    stored, tiled = (_cost_by_length(function, largest_tensor, _zeros) for function in (stores, attend))
    yield equal("stored: growth of the largest tensor", growth(stored, 512), 4.0)
    yield equal("stored: its bytes in float32, n = 1,024", stored(1024), 4 * 1024**2)
    yield equal("stored: weights, n = 4,096, against 16.8 million", stored(4096) / 4, 4096**2)
    yield at_most("not stored: growth of the largest tensor", growth(tiled, 2048), 2.1)
    yield at_most("not stored: its bytes, n = 4,096, as a share of the weights'", tiled(4096) / (4 * 4096**2), 0.07)

    def of_heads(heads: int) -> int:
        x = torch.zeros(1, heads, 1024, 2)
        return largest_tensor(lambda: stores(x, x, x)) // 4

    yield equal("stored, 8 heads, n = 1,024: weights, against 8 n²", of_heads(8), 8 * 1024**2)

    def of_image(side: int) -> int:
        patches = torch.nn.functional.unfold(torch.zeros(1, 1, side, side), 4, stride=4).mT[None]
        return largest_tensor(lambda: stores(patches, patches, patches))

    yield equal("stored, an image in patches of side 4: growth for twice its side", growth(of_image, 64), 16.0)


@claim(
    latex=r"n=100\,000:\ 10^{10}\ \text{weights, infeasible}",
    source="tutorials",
    verdict="refuted",
    conditions="the weights (40 GB in float32 for a head, which a large GPU holds) need not be stored: exact causal "
    "attention over 100,000 tokens runs, a few tiles at a time",
)
def a_hundred_thousand_tokens_are_infeasible(
    draw: Draw,
    *,
    attend: Callable[..., Tensor] = attention,
    largest: Callable[[Callable[[], object]], int] = largest_tensor,
    scores: Callable[[Tensor, Tensor], Tensor] = lambda query, key: query @ key.T,
) -> Measurements:
    """Attention over 100,000 tokens is infeasible, because its weights do not fit into memory."""
    n = 100_000
    q, k, v = (draw.normal(1, 1, n, 4).float() for _ in range(3))
    outputs: list[Tensor] = []
    share = largest(lambda: outputs.append(attend(q, k, v, Causal()))) / (4 * n**2)
    for row in (n // 2, n - 1):
        weights = (q[0, 0, row].double() @ k[0, 0, : row + 1].double().T / 2).softmax(-1)
        error = float((outputs[0][0, 0, row] - weights @ v[0, 0, : row + 1].double()).abs().max())
        yield at_most(Message("exact causal attention, run: error of row {row:,}", row=row), error, 1e-5)
    yield apart("largest tensor created for it, as a share of the 40 GB of all weights", share, 1.0, 0.99)
    x = torch.empty(n, 4, device="meta")
    yield equal("entries of QKᵀ, for one head", scores(x, x).numel(), 1e10)


@claim(
    latex=r"4n^2d+8nd^2\ \text{against}\ 4nd^2",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, table 1, which leaves the projections out",
    verdict="holds if",
    conditions="only the n² part is compared. With its projections, an attention layer takes 8 n d² more: more than "
    "twice as many operations as a tanh network at every length, three times as many at n = d, and as many as an "
    "LSTM, 16 n d², at n = 2 d. The recurrence needs n sequential steps",
)
def recurrence_is_cheaper_for_long_sequences(
    draw: Draw, *, step: Callable[[Tensor], Tensor] = recurrence, layer: Callable[[Tensor], Tensor] = attention_layer
) -> Measurements:
    """A recurrent network takes O(n d²) operations: as many as attention when n is about d."""
    width = 16

    def of(function: Callable[[Tensor], Tensor]) -> Callable[[int], int]:
        return _cost_by_length(lambda x, *_: function(x), make_input=lambda length: _on_meta(length, width))

    attentive, recurrent = of(layer), of(step)
    weights = sum(parameter.numel() for parameter in torch.nn.LSTM(width, width, bias=False).parameters())
    yield equal("recurrence: operations, n = 64, d = 16, against 4 n d²", recurrent(64), 4 * 64 * width**2)
    yield equal("recurrence: growth for twice the length", growth(recurrent, 64), 2.0)
    bare = of(lambda x: dense(x, x, x))
    yield equal("without projections, attention over recurrence, n = d", bare(width) / recurrent(width), 1.0)
    yield equal("with them, n = 1, over the recurrence", attentive(1) / recurrent(1), 2 + 1 / width)
    yield equal("with them, n = d", attentive(width) / recurrent(width), 3.0)
    yield equal("with them, n = 8 d", attentive(8 * width) / recurrent(8 * width), 10.0)
    yield equal("with them, over an LSTM, n = 2 d", attentive(2 * width) / (2 * width * 2 * weights), 1.0)


def _tokens(length: int, width: int) -> Tensor:
    return torch.zeros(1, 1, length, width)


def operations_of_linformer(length: int, rank: int, width: int) -> int:
    """Count the operations of one Linformer head with ``rank`` slots, computed densely so that none is missed."""
    x = _tokens(length, width)
    mechanism = Linformer(length, rank)

    def product() -> Tensor:
        matrix = mechanism(x, x)
        assert isinstance(matrix, LinformerMatrix)
        return matrix.slots() @ (matrix.projection @ x)

    return flops(product)


def weights_over_slots(query: Tensor, slots: Tensor) -> Tensor:
    """Return a Linformer's weights over its slots, ``[q_len, slots]``, for projected keys ``[slots, width]``."""
    mechanism = Linformer(len(slots), len(slots)).double()
    for parameter in mechanism.parameters():
        torch.nn.init.eye_(parameter.data.view(parameter.shape[-2:]))
    matrix = mechanism(query[None, None], slots[None, None])
    assert isinstance(matrix, LinformerMatrix)
    weights: Tensor = matrix.slots().detach()
    return weights[0, 0]


def operations_of_performer(length: int, features: int, width: int) -> int:
    """Count the operations of one Performer head with ``features`` random features."""
    x = _tokens(length, width)
    mechanism = Performer(features)
    mechanism(x, x) @ x  # the first call draws the directions
    return flops(lambda: mechanism(x, x) @ x)


def _exact(length: int, width: int) -> int:
    x = _tokens(length, width)
    return flops(lambda: dense(x, x, x))


@claim(
    latex=r"O(nk)",
    source="Wang et al. 2020, arXiv:2006.04768, section 4",
    verdict="holds",
    conditions="O(nk) leaves out the width, as is usual: for d_k = d_v = d it is 8 n k d, against 4 n² d, so it saves "
    "operations with fewer than n/2 slots. How many slots are enough is another question",
)
def linformer_costs_n_k(
    draw: Draw,
    *,
    count: Callable[[int, int, int], int] = operations_of_linformer,
    slots: Callable[[Tensor, Tensor], Tensor] = weights_over_slots,
) -> Measurements:
    """A Linformer with k slots takes O(n k) operations."""
    yield equal("operations, n = 256, k = 32, d = 16, against 8 n k d", count(256, 32, 16), 8 * 256 * 32 * 16)
    yield equal("growth for twice the length", growth(lambda n: count(n, 32, 16), 256), 2.0)
    yield equal("growth for twice the slots", growth(lambda k: count(256, k, 16), 32), 2.0)
    yield equal("growth for twice the width", growth(lambda d: count(256, 32, d), 16), 2.0)
    yield equal("k = n/2, over exact attention", count(256, 128, 16) / _exact(256, 16), 1.0)
    query, projected = draw.normal(20, 4), draw.normal(5, 4)
    exact = (query @ projected.T / 2).softmax(-1)
    yield same("weights over the slots, against a softmax", slots(query, projected), exact)


@claim(
    latex=r"O(nd)\ \text{or}\ O(nmd)",
    source="tutorials, which leave out m; with it Choromanski et al. 2021, arXiv:2009.14794, section 2.2",
    verdict="holds if",
    conditions="the number m of random features is fixed: the cost is O(n m d), more than exact attention if n is "
    "about m; and m for a given error grows with the norms (how-many-features)",
)
def performer_costs_n_d(draw: Draw, *, count: Callable[[int, int, int], int] = operations_of_performer) -> Measurements:
    """A Performer takes O(n d) operations: linear in the length."""
    yield equal("growth for twice the length", growth(lambda n: count(n, 64, 16), 512), 2.0, 0.02, "the ends")
    yield equal("growth for twice the width", growth(lambda d: count(512, 64, d), 64), 2.0, 0.1, "the denominators")
    features = growth(lambda m: count(512, m, 16), 64)
    yield apart("growth for twice the features, where O(n d) has 1", features, 1.0, 0.9)
    yield at_most("the same, against O(n m d)", features, 2.0, 0.02)
    yield apart(
        "n = m = 128, over exact attention, where O(n d) says less", count(128, 128, 16) / _exact(128, 16), 1.0, 0.5
    )
