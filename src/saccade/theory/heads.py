"""Claims that compare several attention heads with a single head."""

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
from saccade.theory.measurement import Measurements, equal, same


def least_error_of_one_head(share: tuple[float, float] = (-1.0, 1.0)) -> float:
    """Return the smallest error that one head can have on the worse of two inputs, as a multiple of a token's length.

    The head multiplies values by w. For three equal tokens c, the target is 0, and the output is w c for any weights.
    For tokens c, 0, -c, the target is 2c, and weights a and b give w (a - b) c. ``share`` is the range of a - b, which
    is limited because weights are not negative and sum to at most 1.
    """
    map_of_values = torch.linspace(-4, 4, 1601, dtype=torch.float64)[:, None]
    between = torch.linspace(*share, 201, dtype=torch.float64)
    return float(torch.maximum(map_of_values.abs(), (2 - map_of_values * between).abs()).min())


def best_of_one_head(first: float, second: float) -> float:
    """Return the share of the variance of x₁ - x₂ that one head, even with the best W(a x₁ + b x₂), cannot explain."""
    return 1 - (first - second) ** 2 / (2 * (first**2 + second**2))


@claim(
    latex=r"\sum_h A_h X W_h,\qquad y_i=x_{i-1}-x_{i+1}",
    source='tutorials ("several heads attend to several subspaces"); Cordonnier et al. 2020, arXiv:1911.03584',
    verdict="holds",
    conditions="for one layer: weights of one head are not below 0, so it cannot subtract what it gathers, even if "
    "they depend on the data: where all tokens are equal its output is W c whatever they are, and should "
    "be 0",
)
def two_heads_do_what_one_cannot(
    draw: Draw,
    *,
    several: Callable[..., Tensor] = attention,
    floor: Callable[[], float] = least_error_of_one_head,
    residual: Callable[[float, float], float] = best_of_one_head,
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
    yield equal("one head, weights 0.9 and 0.1: by least squares", left, residual(0.9, 0.1), 0.05, "4,000 samples")


@claim(
    latex=r"h\cdot 2n^2(d_k+d_v)=2n^2\cdot(h d_k+h d_v)",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2",
    verdict="holds if",
    conditions="matrix products are counted; softmax, and weights if they are stored, are h times as many",
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
