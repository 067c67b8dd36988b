"""Claims about attention heads: several heads compared with a single head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from saccade.masks import Window
from saccade.matrix import attention
from saccade.nn import MultiHeadAttention
from saccade.theory.claim import Draw, claim
from saccade.theory.complexity import dense, flops
from saccade.theory.measurement import Measurements, at_least, at_most, equal, same
from saccade.theory.rank import weights_of


def least_error_of_one_head(share: tuple[float, float] = (-1.0, 1.0)) -> float:
    """Return the smallest error that one head can have on the worse of two inputs, as a multiple of a token's norm.

    The head multiplies values by w. For three equal tokens c, the target is 0, and the output is w c for any weights.
    For tokens c, 0, -c, the target is 2c, and weights a and b of the outer tokens give w (a - b) c. ``share`` is the
    range of a - b, which is limited because weights are not negative and sum to at most 1.
    """
    map_of_values = torch.linspace(-4, 4, 1601, dtype=torch.float64)[:, None]
    between = torch.linspace(*share, 201, dtype=torch.float64)
    return float(torch.maximum(map_of_values.abs(), (2 - map_of_values * between).abs()).min())


def best_of_one_head(first: float, second: float) -> float:
    """Return the share of the variance of x₁ - x₂ that W(a x₁ + b x₂), one head with the best W, cannot explain.

    ``first`` and ``second`` are the head's weights a and b.
    """
    return 1 - (first - second) ** 2 / (2 * (first**2 + second**2))


@claim(
    latex=r"\sum_h A_h X W_h,\qquad y_i=x_{i-1}-x_{i+1}",
    source='tutorials ("several heads attend to several subspaces"); Cordonnier et al. 2020, arXiv:1911.03584',
    verdict="holds",
    conditions="for one layer: each of two heads can read a different subspace of the features. The weights of one "
    "head are not negative, even if they depend on the data, so it cannot subtract values: if all tokens equal c, its "
    "output is W c for any weights, but should be 0",
)
def two_heads_do_what_one_cannot(
    draw: Draw,
    *,
    several: Callable[..., Tensor] = attention,
    floor: Callable[[], float] = least_error_of_one_head,
    residual: Callable[[float, float], float] = best_of_one_head,
    split: Callable[[Tensor], Tensor] = lambda tokens: tokens.unflatten(-1, (2, -1)).transpose(1, 2),
) -> Measurements:
    """Two heads can compute functions that one head cannot, whatever its weights."""
    n, width = 12, 3
    x = draw.normal(1, 1, n, width)
    heads = x.expand(1, 2, n, width).contiguous()
    before, after = Window(1, 0) & ~Window(0, 0), Window(0, 1) & ~Window(0, 0)
    seen = [several(heads[:, :1], x, x, mask)[0, 0] for mask in (before, after)]
    wanted = x[0, 0, :-2] - x[0, 0, 2:]
    yield same("two heads with output projections I and -I", (seen[0] - seen[1])[1:-1], wanted)
    least = floor()
    yield equal("one head, any weights: error on the worse of two inputs, against a token's length", least, 1.0, 1e-9)
    # Weights that do not depend on the data: the residual of the best projection, by least squares.
    first, second = draw.normal(4000, width), draw.normal(4000, width)
    gathered, target = 0.9 * first + 0.1 * second, first - second
    best = torch.linalg.lstsq(gathered, target).solution
    left = float((gathered @ best - target).square().sum() / target.square().sum())
    yield equal("one head, weights 0.9 and 0.1: by least squares", left, residual(0.9, 0.1), 0.04, "4,000 samples")
    tokens = draw.normal(1, n, 8)
    moved = tokens + torch.cat([torch.zeros(1, n, 4, dtype=torch.float64), draw.normal(1, n, 4)], -1)
    outputs = [several(*[split(one)] * 3) for one in (tokens, moved)]
    change = (outputs[1] - outputs[0]).abs().amax((0, 2, 3))
    yield equal(
        "two heads, each on half of the features: change of the first when the second half changes", float(change[0]), 0
    )
    yield at_least("the same: change of the second", float(change[1]), 0.8)


@claim(
    latex=r"h\cdot 2n^2(d_k+d_v)=2n^2\cdot(h d_k+h d_v)",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2",
    verdict="holds if",
    conditions="only matrix products are counted; h heads compute, and possibly store, h times as many weights",
)
def heads_cost_what_one_costs(
    draw: Draw,
    *,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = dense,
    layer: Callable[[int, int], torch.nn.Module] = lambda width, heads: MultiHeadAttention(
        width, heads, projection_bias=False
    ),
) -> Measurements:
    """Eight heads of width 64 cost the same as one head of width 512."""
    several, one = (torch.empty(1, heads, 128, 512 // heads, device="meta") for heads in (8, 1))
    counted = [flops(partial(attend, x, x, x)) for x in (several, one)]
    yield equal("operations in matrix products, as a multiple", counted[0] / counted[1], 1.0)
    projections = sum(one.numel() for one in layer(512, 8).parameters())
    yield equal("W_Q, W_K, W_V and W_O, h = 8, d_k = d_v = 64: entries, against 4 d²", projections, 4 * 512**2)
    yield equal("operations of one head, against 4 n² d", counted[1], 4 * 128**2 * 512)


@claim(
    latex=r"A_{ij}+A_{ik}\le 1",
    source="tutorials; by definition",
    verdict="holds if",
    conditions="it refers to one query at a time: its weights are one distribution, so two tokens cannot both have "
    "more than half. Queries that know their positions can have different patterns in one head",
)
def a_head_has_one_pattern(draw: Draw, *, weights: Callable[[Tensor, Tensor], Tensor] = weights_of) -> Measurements:
    """A single head has one pattern of attention."""
    n = 16
    positions = torch.eye(n, dtype=torch.float64)
    wanted = torch.where(torch.arange(n) % 2 == 0, torch.arange(n) - 1, torch.arange(n) + 1).clamp(0, n - 1)
    both = weights(100 * positions[wanted], positions)
    least = float(both.gather(1, wanted[:, None]).min())
    yield at_least("one head, even positions look back and odd ones ahead: smallest weight there", least, 0.99)
    random = weights(draw.normal(n, 8), draw.normal(n, 8))
    back, ahead = random.diagonal(-1)[:-1], random.diagonal(1)[1:]  # of tokens 1 to n - 2
    yield at_most(
        "one query: smaller of its weights for both neighbours, largest", float(torch.minimum(back, ahead).max()), 0.5
    )


def after_training(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, x: Tensor, wanted: Tensor
) -> list[Tensor]:
    """Return the projections of all heads after 30 steps of gradient descent on the squared error.

    Args:
        query, key, value: projections ``[heads, width, head_dim]``.
        output: the blocks of the output projection, ``[heads, head_dim, width]``.
        x: tokens ``[n, width]``.
        wanted: the target outputs ``[n, width]``.
    """
    weights = [weight.clone().requires_grad_() for weight in (query, key, value, output)]
    for _ in range(30):
        q, k, v = (x @ weight for weight in weights[:3])
        loss = ((attention(q[None], k[None], v[None])[0] @ weights[3]).sum(0) - wanted).square().mean()
        gradients = torch.autograd.grad(loss, weights)
        weights = [(w - 0.3 * slope).detach().requires_grad_() for w, slope in zip(weights, gradients, strict=True)]
    return [weight.detach() for weight in weights]


@claim(
    latex=r"W^{(1)}=W^{(2)}\ \text{at the start}\ \Rightarrow\ W^{(1)}=W^{(2)}\ \text{after any number of steps}",
    source="tutorials; by symmetry: exchanging equal heads changes nothing, so their gradients are equal",
    verdict="holds if",
    conditions="the heads start differently, as with random weights: heads that start equal, with equal blocks of the "
    "output projection, get equal gradients and stay equal. Nothing else keeps subspaces apart",
)
def each_head_learns_another_subspace(
    draw: Draw, *, train: Callable[..., list[Tensor]] = after_training
) -> Measurements:
    """Each head learns a different subspace."""
    x, wanted = draw.normal(10, 8), draw.normal(10, 8)
    start = [draw.normal(2, 8, 4) / 8**0.5 for _ in range(3)] + [draw.normal(2, 4, 8) / 8**0.5]

    def apart_after(begin: list[Tensor]) -> float:
        return max(float((weight[0] - weight[1]).abs().max()) for weight in train(*begin, x, wanted))

    alike = [weight[:1].expand(weight.shape) for weight in start]
    yield equal("two heads that start equal: largest difference after 30 steps", apart_after(alike), 0.0, 1e-9)
    yield at_least("two heads that start differently: the same", apart_after(start), 0.5)
    yield at_least("equal but for their blocks of W_O: the same", apart_after([*alike[:3], start[3]]), 0.3)
