"""Differential: the difference of two softmax attention maps."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from saccade.matrix import AttentionMatrix, Matrix
from saccade.mechanisms.base import Mechanism
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import unsupported, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.validation import check_int, check_number

_INITIAL_STD = 0.1  # initial standard deviation of the λ vectors


class Differential(Mechanism):
    r"""The difference of two softmax attention maps, which cancels the attention that both have in common.

    .. math:: A = \mathrm{softmax}(q_1 k_1^\top) - \lambda\, \mathrm{softmax}(q_2 k_2^\top), \qquad
              \lambda = e^{\lambda_{q_1} \cdot \lambda_{k_1}} - e^{\lambda_{q_2} \cdot \lambda_{k_2}}
              + \lambda_{\mathrm{init}}, \quad \lambda_{\mathrm{init}} = 0.8 - 0.6\, e^{-0.3\, \mathrm{layer}}

    Each head of queries or keys contains both maps side by side: the first half of its channels belongs to the first
    map. The matrix is a lazy sum (``A1 - lam * A2``), and a product takes two exact products. Weights may be below 0,
    and rows sum to 1 - λ.

    Args:
        head_dim: width of a head in each of the two maps: half the width of the queries and keys.
        layer: index of the layer in its stack, from 0; determines λ_init.
        scale: scale of the dot products; ``head_dim ** -0.5`` when None.

    Attributes:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: trainable vectors ``[head_dim]``; all heads share λ.
        lambda_init: λ_init, a float.

    Raises:
        ValueError: in a call, queries or keys are not ``2 * head_dim`` wide.

    Cost: twice as much as `Softmax` with heads half as wide.

    Example:
        >>> query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
        >>> A = Differential(4)(query, key)
        >>> A.shape, A.is_stochastic, len(A.terms)
        ((1, 2, 5, 5), False, 2)

    Reference: Ye et al. 2024, arXiv:2410.05258, section 2.1.
    """

    def __init__(self, head_dim: int, *, layer: int = 0, scale: float | None = None):
        super().__init__()
        self.head_dim = check_int("head_dim", head_dim)
        self.layer = check_int("layer", layer, 0)
        self.scale = None if scale is None else check_number("scale", scale)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * self.layer)
        self.bias: Tensor | Bias | None = None
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(head_dim)))
        self.reset_parameters()

    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def reset_parameters(self) -> None:
        """Draw the λ vectors from a normal distribution with a small variance, so that λ starts near λ_init."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=_INITIAL_STD)

    @property
    def weight(self) -> Tensor:
        """λ, the weight of the second attention map: a differentiable tensor with one element, float32 or wider."""
        pairs = ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        plus, minus = ((q.to(wide_dtype(q.dtype)) * k).sum().exp() for q, k in pairs)
        return plus - minus + self.lambda_init

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> Matrix:
        for name, x in (("query", query), ("key", key)):
            if x.shape[-1] != 2 * self.head_dim:
                rule = f"have a width of {2 * self.head_dim}, two heads of head_dim {self.head_dim} side by side"
                raise value_error(name, rule, x.shape[-1])
        halves = zip(query.split(self.head_dim, -1), key.split(self.head_dim, -1), strict=True)
        first, second = (
            AttentionMatrix(
                q, k, mask, bias=self.bias, scale=self.scale, q_positions=q_positions, kv_positions=kv_positions
            )
            for q, k in halves
        )
        return first - self.weight * second

    def with_bias(self, bias: Tensor | Bias) -> Differential:
        """Return a copy of this mechanism for one call, with a bias added to the scores of both attention maps."""
        if self.bias is not None:
            reason = "it has a bias already"
            raise unsupported("bias", [reason])
        biased = Differential(self.head_dim, layer=self.layer, scale=self.scale)
        biased.bias = bias
        for name, parameter in self.named_parameters():
            setattr(biased, name, parameter)
        return self._with_hooks(biased)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, layer={self.layer}, scale={self.scale}"
