"""Information: the bounds of sparse weights, and the limits of weights as explanations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Window
from saccade.matrix import AttentionMatrix, attention
from saccade.theory.bottleneck import bits
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, differ, equal, same
from saccade.theory.rank import weights_of


def gaussian_information(weights: Tensor, variance: float) -> float:
    """Return I(X; AX + ε) in nats per feature, for standard normal X and ε of this variance: half a log-determinant."""
    eye = torch.eye(len(weights), dtype=weights.dtype)
    return float(torch.linalg.slogdet(eye + weights @ weights.T / variance)[1]) / 2


def divergence_from_mean_row(weights: Tensor) -> float:
    """Return the mutual information of query and key position: the mean divergence of rows from the mean row."""
    mean = weights.mean(0)
    ratio = torch.where(weights > 0, weights * (weights / mean).log(), 0.0)
    return float(ratio.sum(-1).mean())


def other_weights(weights: Tensor, value: Tensor) -> Tensor:
    """Return rows with equal output, no negative weight and sum 1, moved as far from the old weights as possible.

    It walks along edges of the feasible polytope, like linear programming: each step sets one more weight to 0 without
    raising the total old weight of the remaining keys, until d_v + 1 keys are left.
    """
    constraints = torch.cat([value, torch.ones(len(value), 1, dtype=value.dtype)], 1)
    found = weights.clone()
    for row, old in zip(found, weights, strict=True):
        kept = torch.arange(len(row))
        while len(kept) > constraints.shape[1]:
            # A direction orthogonal to the columns of the values and to the ones; downhill if it has a slope.
            free = torch.linalg.svd(constraints[kept].T).Vh[constraints.shape[1] :]
            direction = -(free.T @ (free @ old[kept]))
            if direction.norm() < 1e-9:
                direction = free[0]
            room = torch.where(direction < 0, -row[kept] / direction, torch.inf)
            row[kept] += room.min() * direction
            row[kept[room.argmin()]] = 0.0
            kept = kept[torch.arange(len(kept)) != room.argmin()]
    return found.clamp_min(0)


def patterns(n: int) -> dict[str, Tensor]:
    """Return three ``[n, n]`` matrices: one key for each query, the same key for all, and all keys equally."""
    eye = torch.eye(n, dtype=torch.float64)
    return {"one key each": eye, "sink": eye[:1].expand(n, n), "uniform": torch.full_like(eye, 1 / n)}


def fixed_support(tokens: Tensor) -> Tensor:
    """Sum the last token and the one before: the mask chooses them, not the tokens."""
    x = tokens[:, None]
    return attention(x, x, x, Window(1, 0))[:, 0, -1]


def chosen_support(tokens: Tensor) -> Tensor:
    """Return the first token with the highest first entry: the tokens choose it."""
    scores = tokens[..., 0] - 0.01 * torch.arange(tokens.shape[1])
    return tokens[torch.arange(len(tokens)), scores.argmax(-1)]


@claim(
    latex=r"I(X;o_i)\le H(x_j,\,j\in S_i)",
    source="tutorials; the bound is that of a function of these tokens, Cover and Thomas 2006, section 2.8",
    verdict="holds if",
    conditions="one query's output is meant, the keys it sees are fixed by the mask, and it is among them. If the "
    "tokens choose the keys, the choice itself carries information; and the outputs of all queries together are not "
    "bounded: with noise they carry (d/2) log det(I + AAᵀ/σ²), most of all with one key for each query",
)
def sparse_weights_bound_information(
    draw: Draw,
    *,
    fixed: Callable[[Tensor], Tensor] = fixed_support,
    chosen: Callable[[Tensor], Tensor] = chosen_support,
    information: Callable[[Tensor, float], float] = gaussian_information,
) -> Measurements:
    """Sparse weights bound the information that passes from the input to the output."""
    # Every outcome of six coins, as tokens that also contain their position.
    coins, width = 6, 5
    faces = draw.normal(coins, 2, width)
    faces[..., 0] = torch.tensor([-1.0, 1.0])
    outcomes = torch.cartesian_prod(*[torch.arange(2)] * coins)
    tokens = faces[torch.arange(coins), outcomes]

    def told(outputs: Tensor) -> float:
        return bits([tuple(round(x, 6) for x in row) for row in outputs.tolist()])

    yield at_most("two coins seen, by mask: bits in a query's output", told(fixed(tokens)), 2.0, 1e-9)
    yield at_least("one coin seen, chosen by all: bits, against one", told(chosen(tokens)) - 1, 0.1)
    n, variance = 16, 0.01
    found = {name: information(one, variance) for name, one in patterns(n).items()}
    yield equal("all queries, one key each: nats, by hand", found["one key each"], n / 2 * math.log(101), 1e-9)
    yield equal("all queries, a sink: nats, by hand", found["sink"], math.log(1 + n * 100) / 2, 1e-9)
    yield equal("all queries, uniform weights: nats, by hand", found["uniform"], math.log(101) / 2, 1e-9)
    yield apart("one key each, which is sparser than uniform weights", found["one key each"], found["uniform"], 30.0)


@claim(
    latex=r"I=H(\bar a)-\tfrac1n\sum_i H(a_i)=\tfrac1n\sum_i\mathrm{KL}(a_i\Vert\bar a),\qquad 0\le I\le\ln n",
    source="Cover and Thomas 2006, section 2.4, for a query drawn at random and the key drawn from its row",
    verdict="holds",
    conditions="rows that sum to 1; a causal mask alone makes it more than 0",
)
def position_information(
    draw: Draw, *, divergence: Callable[[Tensor], float] = divergence_from_mean_row
) -> Measurements:
    """Entropies and column sums give exactly the information that a query's position has about the position it
    attends to.
    """
    n = 24
    for name, one in patterns(n).items():
        expected = math.log(n) if name == "one key each" else 0.0
        yield equal(f"{name}: nats", divergence(one), expected)
    matrix = AttentionMatrix(draw.normal(1, 1, n, 4), draw.normal(1, 1, n, 4))
    mean = matrix.received()[0, 0] / n
    entropies = float(torch.special.entr(mean).sum() - matrix.entropy()[0, 0].mean())
    seen = divergence(matrix.to_dense()[0, 0])
    yield equal("random weights, from entropies and column sums", entropies, seen)
    yield at_most("the same, against ln n", seen, math.log(n))


def without_each(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the change of each output when the value of one key is set to 0, ``[q_len, kv_len]``."""
    outputs = attend(query[None, None], key[None, None], value[None, None])[0, 0]
    moved = []
    for index in range(len(value)):
        other = value.clone()
        other[index] = 0.0
        moved.append((attend(query[None, None], key[None, None], other[None, None])[0, 0] - outputs).norm(dim=-1))
    return torch.stack(moved, -1)


@claim(
    latex=r"O=AV\ \Rightarrow\ A\ \text{is determined}",
    source='tutorials ("interpretable"); against it Jain and Wallace 2019, arXiv:1902.10186: other weights give '
    "the same answer; against them Wiegreffe and Pinter 2019, arXiv:1908.04626: such weights have to be "
    "ones that the model makes",
    verdict="refuted",
    conditions="with more keys than d_v + 1, other rows that sum to 1 give the same output for these values, with "
    "most of the attention elsewhere. The weights do predict the effect of removing a value; the other weights "
    "predict it wrongly",
)
def weights_explain_the_output(
    draw: Draw,
    *,
    other: Callable[[Tensor, Tensor], Tensor] = other_weights,
    attend: Callable[..., Tensor] = attention,
) -> Measurements:
    """The weights explain the output: no others would give it."""
    n, width = 40, 8
    query, key, value = draw.normal(12, 4), draw.normal(n, 4), draw.normal(n, width)
    weights = weights_of(query, key)
    found = other(weights, value)
    yield same("output of the other weights", found @ value, weights @ value, 1e-10)
    yield same("sums of their rows, against 1", found.sum(-1), torch.ones(len(query), dtype=torch.float64), 1e-10)
    yield at_least("their smallest weight", float(found.min()), 0.0, 1e-12)
    moved = float((found - weights).abs().sum(-1).mean() / 2)
    yield apart("share of the attention that moved elsewhere, mean over queries", moved, 0.0, 0.5)
    lengths, effect = value.norm(dim=-1), without_each(attend, query, key, value)
    yield same(
        "a value set to 0: how far the output moves, against weight times length", effect, weights * lengths, 1e-9
    )
    yield differ("the same, against the other weights times length", found * lengths, effect, 0.1)
