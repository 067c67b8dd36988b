"""Claims about information: the information bottleneck, bounds for sparse weights, and weights as explanations."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from saccade.masks import Window
from saccade.matrix import AttentionMatrix, attention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, differ, equal, same
from saccade.theory.rank import weights_of


def gaussian_information(weights: Tensor, variance: float) -> float:
    """Return the mutual information I(X; AX + ε) in nats per feature.

    X is standard normal, and ε is normal noise with the given variance.
    """
    eye = torch.eye(len(weights), dtype=weights.dtype)
    return float(torch.linalg.slogdet(eye + weights @ weights.T / variance)[1]) / 2


def divergence_from_mean_row(weights: Tensor) -> float:
    """Return the mutual information of query and key positions, the mean divergence of rows from the mean row."""
    mean = weights.mean(0)
    ratio = torch.where(weights > 0, weights * (weights / mean).log(), 0.0)
    return float(ratio.sum(-1).mean())


def other_weights(weights: Tensor, value: Tensor) -> Tensor:
    """Find weights that are far from the original weights but give the same attention output; their rows sum to 1.

    The search follows edges of the feasible polytope, as linear programming does. Each iteration sets one more weight
    to 0 without raising the total original weight of the remaining keys, until d_v + 1 keys are left.
    """
    constraints = torch.cat([value, torch.ones(len(value), 1, dtype=value.dtype)], 1)
    moved = weights.clone()
    for row, old in zip(moved, weights, strict=True):
        support = torch.arange(len(row))
        while len(support) > constraints.shape[1]:
            # A direction orthogonal to the columns of the values and to the vector of ones, downhill if possible.
            free = torch.linalg.svd(constraints[support].T).Vh[constraints.shape[1] :]
            direction = -(free.T @ (free @ old[support]))
            if direction.norm() < 1e-9:
                direction = free[0]
            room = torch.where(direction < 0, -row[support] / direction, torch.inf)
            row[support] += room.min() * direction
            row[support[room.argmin()]] = 0.0
            support = support[torch.arange(len(support)) != room.argmin()]
    return moved.clamp_min(0)


def patterns(n: int) -> dict[str, Tensor]:
    """Return weights ``[n, n]`` of three patterns, which are one key for each query, a sink, and uniform weights."""
    eye = torch.eye(n, dtype=torch.float64)
    return {"one key each": eye, "sink": eye[:1].expand(n, n), "uniform": torch.full_like(eye, 1 / n)}


def fixed_support(tokens: Tensor) -> Tensor:
    """Return the attention output of the last query in a window of two tokens; the mask alone selects the keys."""
    x = tokens[:, None]
    return attention(x, x, x, Window(1, 0))[:, 0, -1]


def chosen_support(tokens: Tensor) -> Tensor:
    """Return the token with the largest first entry (the first on ties), so that the tokens determine which one."""
    scores = tokens[..., 0] - 0.01 * torch.arange(tokens.shape[1])
    return tokens[torch.arange(len(tokens)), scores.argmax(-1)]


@claim(
    latex=r"I(X;o_i)\le H(x_j,\,j\in S_i)",
    source="tutorials; the bound is that of a function of these tokens, Cover and Thomas 2006, section 2.8",
    verdict="holds if",
    conditions="it refers to the output of one query, and the mask fixes the keys that this query sees, including its "
    "own. If the tokens choose the keys, the choice itself carries information; and the outputs of all queries "
    "together are not bounded: with noise they carry (d/2) log det(I + AAᵀ/σ²), most of all with one key for each "
    "query",
)
def sparse_weights_bound_information(
    draw: Draw,
    *,
    fixed: Callable[[Tensor], Tensor] = fixed_support,
    chosen: Callable[[Tensor], Tensor] = chosen_support,
    information: Callable[[Tensor, float], float] = gaussian_information,
) -> Measurements:
    """Sparse weights bound the information that passes from the input to the output."""
    # All outcomes of six coins, as tokens that also encode their position.
    coins, width = 6, 5
    faces = draw.normal(coins, 2, width)
    faces[..., 0] = torch.tensor([-1.0, 1.0])
    outcomes = torch.cartesian_prod(*[torch.arange(2)] * coins)
    tokens = faces[torch.arange(coins), outcomes]

    def output_bits(outputs: Tensor) -> float:
        return bits([tuple(round(x, 6) for x in row) for row in outputs.tolist()])

    yield at_most("two coins seen, by mask: bits in a query's output", output_bits(fixed(tokens)), 2.0, 1e-9)
    yield at_least("one coin seen, chosen by all: bits, against one", output_bits(chosen(tokens)) - 1, 0.1)
    n, variance = 16, 0.01
    nats = {name: information(pattern, variance) for name, pattern in patterns(n).items()}
    yield equal("all queries, one key each: nats, by hand", nats["one key each"], n / 2 * math.log(101), 1e-9)
    yield equal("all queries, a sink: nats, by hand", nats["sink"], math.log(1 + n * 100) / 2, 1e-9)
    yield equal("all queries, uniform weights: nats, by hand", nats["uniform"], math.log(101) / 2, 1e-9)
    yield apart("one key each, which is sparser than uniform weights", nats["one key each"], nats["uniform"], 30.0)


@claim(
    latex=r"I=H(\bar a)-\tfrac1n\sum_i H(a_i)=\tfrac1n\sum_i\mathrm{KL}(a_i\Vert\bar a),\qquad 0\le I\le\ln n",
    source="Cover and Thomas 2006, section 2.4, for a query drawn at random and the key drawn from its row",
    verdict="holds",
    conditions="rows that sum to 1; a causal mask alone makes it more than 0",
)
def position_information(
    draw: Draw, *, divergence: Callable[[Tensor], float] = divergence_from_mean_row
) -> Measurements:
    """Entropies and column sums give exactly the information that a query's position carries about the attended
    position.
    """
    n = 24
    for name, pattern in patterns(n).items():
        expected = math.log(n) if name == "one key each" else 0.0
        yield equal(Message("{name}: nats", name=Message(name)), divergence(pattern), expected)
    matrix = AttentionMatrix(draw.normal(1, 1, n, 4), draw.normal(1, 1, n, 4))
    mean = matrix.received()[0, 0] / n
    entropies = float(torch.special.entr(mean).sum() - matrix.entropy()[0, 0].mean())
    seen = divergence(matrix.to_dense()[0, 0])
    yield equal("random weights, from entropies and column sums", entropies, seen)
    yield at_most("the same, against ln n", seen, math.log(n))


def without_each(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return how much each attention output changes when the value of a key is set to 0, ``[q_len, kv_len]``."""
    outputs = attend(query[None, None], key[None, None], value[None, None])[0, 0]
    distances = []
    for index in range(len(value)):
        other = value.clone()
        other[index] = 0.0
        distances.append((attend(query[None, None], key[None, None], other[None, None])[0, 0] - outputs).norm(dim=-1))
    return torch.stack(distances, -1)


def without_token(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return how much each attention output changes when a key and its value are removed, ``[q_len, kv_len]``."""
    outputs = attend(query[None, None], key[None, None], value[None, None])[0, 0]
    distances = []
    for index in range(len(value)):
        left = torch.arange(len(value)) != index
        other = attend(query[None, None], key[None, None, left], value[None, None, left])[0, 0]
        distances.append((other - outputs).norm(dim=-1))
    return torch.stack(distances, -1)


def weights_from_output(output: Tensor, value: Tensor) -> Tensor:
    """Return the weights that sum to 1 and produce an output, by least squares from output and values alone."""
    constraints = torch.cat([value, torch.ones(len(value), 1, dtype=value.dtype)], 1)
    wanted = torch.cat([output, torch.ones(len(output), 1, dtype=value.dtype)], 1)
    return torch.linalg.lstsq(constraints.T, wanted.T, driver="gelsd").solution.T


@claim(
    latex=r"O=AV\ \Rightarrow\ A\ \text{is determined}",
    source='tutorials ("interpretable"); against it Jain and Wallace 2019, arXiv:1902.10186: other weights give the '
    "same answer; against them Wiegreffe and Pinter 2019, arXiv:1908.04626: such weights must be ones that the model "
    "can produce; on the share of the weights that determines the output Brunner et al. 2020, arXiv:1908.04211",
    verdict="refuted",
    conditions="with more keys than d_v + 1, other rows that sum to 1 give the same output for these values, with "
    "most of the attention elsewhere; up to d_v + 1 keys with independent values, the output determines the weights. "
    "The contribution of a value to the sum has the length of the value times its weight. Removing a token moves the "
    "output by a/(1 - a) times the distance of its value from the output: not at all if all values are equal. The "
    "weights have the same order as these effects if values are orthogonal and equally long, but not in general. "
    "Weights say nothing about what other layers do with the output",
)
def weights_explain_the_output(
    draw: Draw,
    *,
    other: Callable[[Tensor, Tensor], Tensor] = other_weights,
    attend: Callable[..., Tensor] = attention,
    removed: Callable[..., Tensor] = without_token,
    found: Callable[[Tensor, Tensor], Tensor] = weights_from_output,
) -> Measurements:
    """The weights explain the output: no other weights would produce it."""
    n, width = 40, 8
    query, key, value = draw.normal(12, 4), draw.normal(n, 4), draw.normal(n, width)
    weights = weights_of(query, key)
    others = other(weights, value)
    yield same("output of the other weights", others @ value, weights @ value, 1e-10)
    yield same("sums of their rows, against 1", others.sum(-1), torch.ones(len(query), dtype=torch.float64), 1e-10)
    yield at_least("their smallest weight", float(others.min()), 0.0, 1e-12)
    moved = float((others - weights).abs().sum(-1).mean() / 2)
    yield apart("share of the attention that moved elsewhere, mean over queries", moved, 0.0, 0.5)
    lengths, effect = value.norm(dim=-1), without_each(attend, query, key, value)
    yield same(
        "a value set to 0: how far the output moves, against weight times length", effect, weights * lengths, 1e-9
    )
    yield differ("the same, against the other weights times length", others * lengths, effect, 0.1)
    few = weights_of(query, key[: width + 1])
    yield same(
        "9 keys, values of width 8: weights found from the output alone, against its weights",
        found(few @ value[: width + 1], value[: width + 1]),
        few,
        1e-9,
    )
    query = draw.normal(200, 4)
    weights = weights_of(query, key)
    moves = weights / (1 - weights) * torch.cdist(weights @ value, value)
    effect = removed(attend, query, key, value)
    yield same(
        "a token removed: how far the output moves, against a/(1 - a) times its value's distance from it",
        effect,
        moves,
        1e-9,
    )
    yield apart(
        "share of queries whose token of most weight is not the one whose removal moves the output most",
        float((effect.argmax(-1) != weights.argmax(-1)).double().mean()),
        0.0,
        0.1,
    )
    alike = removed(attend, query, key, value[:1].expand(n, width))
    yield at_most("equal values: largest effect of removing a token", float(alike.max()), 0.0, 1e-12)
    effect = removed(attend, query, key, torch.eye(n, dtype=torch.float64))
    in_order = (effect.argsort(-1) == weights.argsort(-1)).all(-1)
    yield equal(
        "orthogonal values of one length: share of queries where the order of the weights is that of the effects",
        float(in_order.double().mean()),
        1.0,
    )


_BETA = 2.0
_INPUTS = tuple(itertools.product((0, 1), repeat=3))  # three fair coins; the target is the first


def bits(outcomes: Sequence[Hashable]) -> float:
    """Return the Shannon entropy in bits of a list of equally probable outcomes."""
    return sum(-count / len(outcomes) * math.log2(count / len(outcomes)) for count in Counter(outcomes).values())


def bottleneck_terms(outcomes: Sequence[Hashable], targets: Sequence[Hashable]) -> tuple[float, float]:
    """Return the two terms of the information bottleneck, I(X; Z) and I(Z; Y) in bits, for Z = f(X) and uniform X."""
    pairs = list(zip(outcomes, targets, strict=True))
    return bits(outcomes), bits(outcomes) + bits(targets) - bits(pairs)


def _partitions(n: int) -> Iterator[tuple[int, ...]]:
    """Yield every deterministic map Z = f(X) of n inputs, as a list with the class number of each input."""
    partitions: list[tuple[int, ...]] = [()]
    for _ in range(n):
        partitions = [(*start, label) for start in partitions for label in range(max(start, default=-1) + 2)]
    return iter(partitions)


@claim(
    latex=r"\min\ I(X;Z)-\beta I(Z;Y)",
    source='tutorials; the principle: Tishby et al. 1999, arXiv:physics/0004057; for networks Saxe et al. 2018, "On '
    'the information bottleneck theory of deep learning"',
    verdict="refuted",
    conditions="softmax weights are above 0, so in general the output still distinguishes all inputs: the first term "
    "is at its maximum, and no part of attention reduces it. Weights of exactly 0, or noise, discard information; "
    "training for the target affects only the second term",
)
def attention_is_an_information_bottleneck(
    draw: Draw,
    *,
    attend: Callable[..., Tensor] = attention,
    terms: Callable[[Sequence[Hashable], Sequence[Hashable]], tuple[float, float]] = bottleneck_terms,
) -> Measurements:
    """Attention retains information about the target and discards the rest: an information bottleneck."""
    coins, targets = torch.tensor(_INPUTS, dtype=torch.float64), [first for first, *_ in _INPUTS]
    tags = torch.eye(3, dtype=torch.float64).expand(8, 1, 3, 3)

    def terms_of_weights(scores: Tensor) -> tuple[float, float]:
        out = attend(scores.expand(8, 1, 1, 3), tags, coins[:, None, :, None], scale=1.0)
        return terms([round(output, 9) for output in out.flatten().tolist()], targets)

    soft = terms_of_weights(draw.normal(3) + torch.tensor([2.0, 0.0, 0.0]))
    hard = terms_of_weights(torch.tensor([1e3, 0.0, 0.0], dtype=torch.float64))
    even = terms_of_weights(torch.zeros(3, dtype=torch.float64))
    yield apart("three coins, the first is the target: bits about the input; a bottleneck retains 1", soft[0], 1.0, 1.5)
    yield equal("the same: bits about the target", soft[1], 1.0)
    yield equal("weights of exactly 1, 0, 0: bits about the input", hard[0], 1.0)
    yield equal("the same: bits about the target", hard[1], 1.0)
    yield equal("equal weights, by hand: bits about the input", even[0], 3 - 0.75 * math.log2(3))
    yield equal("the same: bits about the target", even[1], 1.5 - 0.75 * math.log2(3))
    every_map = [terms(labels, targets) for labels in _partitions(8)]
    least = min(about_input - _BETA * about_target for about_input, about_target in every_map)
    yield equal(Message("least I(X; Z) - 2 I(Z; Y) of all {count:,} maps", count=len(every_map)), least, 1 - _BETA)
    yield apart("the same of softmax weights", soft[0] - _BETA * soft[1], least, 1.5)
