"""Claims about attention as a matrix product, with a matrix that depends on the data."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.matrix import AttentionMatrix, attention
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, differ, equal, same
from saccade.theory.rank import centred_logs, weights_of

EXAMPLE = {
    "query": [[0.1, 0.2, -0.3, 0.4], [-0.2, 0.3, 0.1, -0.5]],
    "key": [[0.2, 0.1, 0.4, -0.3], [-0.1, 0.5, 0.2, 0.1], [0.3, -0.2, 0.1, 0.4]],
    "value": [[0.5, -0.1, 0.2, 0.3, 0.0], [0.1, 0.4, -0.2, 0.1, 0.5], [-0.3, 0.2, 0.1, -0.4, 0.2]],
}
"""Two queries and three keys with width 4, and three values with width 5: small enough to compute by hand."""


def by_hand(
    query: list[list[float]], key: list[list[float]], value: list[list[float]]
) -> tuple[list[list[float]], list[list[float]]]:
    """Compute the weights and the output of attention in plain Python, one number at a time."""
    weights, output = [], []
    for q in query:
        scores = [sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q)) for k in key]
        powers = [math.exp(score) for score in scores]
        row = [power / sum(powers) for power in powers]
        weights.append(row)
        output.append([sum(a * v[e] for a, v in zip(row, value, strict=True)) for e in range(len(value[0]))])
    return weights, output


def factors_of_logits(weights: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return queries and keys with width ``head_dim`` whose matrix product best approximates the logarithms of weights.

    Softmax ignores a constant in each row, so the logarithms are first centred and then truncated to their
    ``head_dim`` largest singular values.
    """
    u, s, vh = torch.linalg.svd(centred_logs(weights))
    root = (s[:head_dim] * math.sqrt(head_dim)).sqrt()
    return u[:, :head_dim] * root, vh[:head_dim].T * root


@claim(
    latex=r"O=\mathrm{softmax}\!\left(QK^\top/\sqrt{d_k}\right)V",
    source="two queries, three keys, d_k = 4, d_v = 5: an example of the tutorials, computed with Python's floats",
    verdict="holds",
)
def worked_example(draw: Draw, *, attention: Callable[..., Tensor] = attention) -> Measurements:
    """Attention computed number by number equals the result of the library."""
    q, k, v = (torch.tensor(EXAMPLE[name], dtype=torch.float64)[None, None] for name in ("query", "key", "value"))
    weights, output = by_hand(EXAMPLE["query"], EXAMPLE["key"], EXAMPLE["value"])
    eye = torch.eye(3, dtype=torch.float64)[None, None]
    yield same("weights", attention(q, k, eye)[0, 0], torch.tensor(weights, dtype=torch.float64))
    yield same("output", attention(q, k, v)[0, 0], torch.tensor(output, dtype=torch.float64))
    yield equal("weight of query 1 for key 1", float(attention(q, k, eye)[0, 0, 0, 0]), weights[0][0])


@claim(
    latex=r"a=\sum_i\alpha_i x_i=\alpha^\top X,\qquad e_i=q^\top x_i\ \Rightarrow\ e=Xq",
    source="the tutorials' derivation; Bahdanau et al. 2015, arXiv:1409.0473, section 3.1",
    verdict="holds",
    conditions="for dot-product scores; a score from a network (additive attention) is not a matrix product",
)
def sums_are_matrix_products(
    draw: Draw,
    *,
    scores: Callable[[Tensor, Tensor], Tensor] = lambda query, x: x @ query / math.sqrt(x.shape[1]),
    output: Callable[[Tensor, Tensor], Tensor] = lambda weights, x: weights @ x,
    attention: Callable[..., Tensor] = attention,
) -> Measurements:
    """The weighted average over inputs, written as sums, is a chain of matrix products around one softmax."""
    x, query = draw.normal(6, 4), draw.normal(4)
    one_by_one = torch.tensor(
        [sum(float(query[c] * x[i, c]) for c in range(4)) / 2 for i in range(6)], dtype=torch.float64
    )
    yield same("scores, one by one and as X q", scores(query, x), one_by_one)
    powers = [math.exp(float(score)) for score in one_by_one]
    weights = torch.tensor([power / sum(powers) for power in powers], dtype=torch.float64)
    yield same("weights, one by one and as softmax of a vector", scores(query, x).softmax(-1), weights)
    summed = torch.tensor([sum(float(weights[i] * x[i, c]) for i in range(6)) for c in range(4)], dtype=torch.float64)
    yield same("output, one by one and as αᵀX", output(weights, x), summed)
    whole = attention(query[None, None, None], x[None, None], x[None, None])[0, 0, 0]
    yield same("output, against the library", whole, summed)


def is_refused(widths: tuple[int, int], lengths: tuple[int, int], attend: Callable[..., Tensor]) -> bool:
    """Return whether attention raises an error for two widths (of query, key) and two lengths (of key, value)."""
    query, key = torch.zeros(1, 1, 3, widths[0]), torch.zeros(1, 1, lengths[0], widths[1])
    try:
        attend(query, key, torch.zeros(1, 1, lengths[1], 2))
    except (RuntimeError, ValueError):
        return True
    return False


def layer_as_printed(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Run the attention layer as printed in a tutorial, with weights of shape ``[batch, n, 1]``.

    It multiplies these weights by the values ``[batch, n, width]`` without transposing them, so it only runs for n = 1.
    """
    weights = (key @ weight.T).bmm(query.transpose(1, 2)).softmax(1)
    return weights.bmm(value)


@claim(
    latex=r"Q\in\mathbb{R}^{n\times d_k},\ K\in\mathbb{R}^{m\times d_k},\ V\in\mathbb{R}^{m\times d_v}",
    source="lists of common mistakes in tutorials; the shapes of the definition",
    verdict="holds if",
    conditions="it refers to the widths of queries and keys, and to the lengths of keys and values; n and m, d_k and "
    "d_v need not agree. If n = m, keys times queries fits as well and is wrong: a product that fits proves nothing",
)
def dimensions_must_agree(
    draw: Draw, *, attend: Callable[..., Tensor] = attention, printed: Callable[..., Tensor] = layer_as_printed
) -> Measurements:
    """The dimensions of queries, keys and values must agree."""
    query, key, value = draw.normal(3, 4), draw.normal(5, 4), draw.normal(5, 2)
    weights = torch.tensor(by_hand(query.tolist(), key.tolist(), value.tolist())[0], dtype=torch.float64)
    output = attend(query[None, None], key[None, None], value[None, None])[0, 0]
    yield same("n = 3, m = 5, d_k = 4, d_v = 2: output", output, weights @ value)
    yield equal("queries of width 4, keys of width 6: refused", is_refused((4, 6), (5, 5), attend), True)
    yield equal("5 keys, 6 values: refused", is_refused((4, 4), (5, 6), attend), True)
    tokens = draw.normal(1, 1, 5, 4)
    turned = (tokens @ tokens.mT / 2).softmax(-2) @ tokens
    yield differ("n = m: keys times queries fits too", turned, attend(tokens, tokens, tokens), 0.01)

    def runs(keys: int, width: int) -> bool:
        x = torch.zeros(2, keys, 4)
        try:
            return printed(torch.zeros(2, 1, 4), x, x, torch.zeros(width, 4)).shape == (2, 1, 4)
        except RuntimeError:
            return False

    yield equal("weights of shape [5, 1] times values of shape [5, 4], as printed: runs", runs(5, 4), False)
    yield equal("the same with a single key: runs", runs(1, 4), True)
    yield equal("the same with a projection from width 4 to width 3: runs", runs(1, 3), False)


@claim(
    latex=r"O=A(Q,K)\,V",
    source="by definition; the tutorials call it a data-dependent linear map",
    verdict="holds if",
    conditions="queries and keys are held fixed: as a map of the sequence itself, self-attention is not linear",
)
def linear_in_the_values(
    draw: Draw,
    *,
    attention: Callable[..., Tensor] = attention,
    matrix: Callable[[Tensor, Tensor], AttentionMatrix] = AttentionMatrix,
) -> Measurements:
    """Attention is a linear map of the values, whose matrix depends on queries and keys."""
    q, k = draw.normal(1, 1, 5, 4), draw.normal(1, 1, 6, 4)
    v, w = draw.normal(1, 1, 6, 3), draw.normal(1, 1, 6, 3)
    both = attention(q, k, 2 * v - 3 * w)
    yield same("2V - 3W, together and apart", both, 2 * attention(q, k, v) - 3 * attention(q, k, w))
    weights = matrix(q, k).to_dense()
    yield same("output against the matrix times the values", attention(q, k, v), weights @ v)
    other = matrix(draw.normal(1, 1, 5, 4), k).to_dense()
    yield differ("entries of the matrix for other queries", other, weights, 0.01)
    twice = attention(2 * k, 2 * k, 2 * k) - 2 * attention(k, k, k)
    yield apart("self-attention of 2X against twice that of X", float(twice.abs().max()), 0.0, 0.01)


@claim(
    latex=r"\exists\,Q,K:\ \mathrm{softmax}(QK^\top/\sqrt{d_k})=P"
    r"\iff\mathrm{rank}\bigl(\log P\,(I-\tfrac1n\mathbf{1}\mathbf{1}^\top)\bigr)\le d_k",
    source="tutorials; Bhojanapalli et al. 2020, arXiv:2002.07028, theorem 1",
    verdict="holds if",
    conditions="all weights are above 0 and the logarithms of the weights, centred row by row, have rank d_k at most; "
    "d_k of n - 1 is always enough, and a weight of exactly 0 needs a mask. Equal keys always get equal weights",
)
def any_weighted_average(
    draw: Draw,
    *,
    factors: Callable[[Tensor, int], tuple[Tensor, Tensor]] = factors_of_logits,
    average: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(-1),
    of: Callable[[Tensor, Tensor], Tensor] = weights_of,
) -> Measurements:
    """Attention can compute any weighted average."""
    n = 8
    wanted = average(draw.normal(n, n))

    def reached(head_dim: int) -> Tensor:
        return weights_of(*factors(wanted, head_dim))

    yield same("weights reached with d_k = 7, against those wanted, n = 8", reached(n - 1), wanted, 1e-9)
    centred = centred_logs(wanted)
    singular = torch.linalg.svdvals(centred)
    yield equal("rank of the centred logarithms", int(torch.linalg.matrix_rank(centred)), n - 1)
    # Scores with rank 2 cannot be closer to the centred logarithms than this.
    yield at_least("distance that d_k = 2 must leave in the logarithms", float(singular[2:].norm()), 0.1)
    narrow = centred_logs(reached(2))
    yield differ("weights reached with d_k = 2", reached(2), wanted, 0.01)
    yield at_most("rank of their centred logarithms", int(torch.linalg.matrix_rank(narrow, rtol=1e-9)), 2)
    alike = draw.normal(n, 4)
    alike[1] = alike[0]
    both = of(draw.normal(n, 4), alike)
    yield equal(
        "two equal keys: largest difference of their weights", float((both[:, 0] - both[:, 1]).abs().max()), 0.0
    )
