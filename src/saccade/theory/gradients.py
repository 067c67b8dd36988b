"""Claims about the gradients of attention with respect to query, key and value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.masks import Causal
from saccade.matrix import attention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, equal, same


class Gradients(NamedTuple):
    """Gradients of a scalar loss of attention with respect to query, key, value and scores.

    Attributes:
        query, key, value: gradients with respect to the inputs.
        scores: gradients with respect to the scaled scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor


def backward(weights: Tensor, query: Tensor, key: Tensor, value: Tensor, output_gradient: Tensor) -> Gradients:
    """Compute the gradients of attention in closed form, without building a Jacobian.

    For one head, ``[len, width]``, with scale 1/√d_k: dV = Aᵀ dO, dA = dO Vᵀ, dS = A ∘ (dA - D) with D the row sums of
    dO ∘ O, dQ = dS K / √d_k and dK = dSᵀ Q / √d_k.
    """
    output = weights @ value
    of_weights = output_gradient @ value.T
    of_scores = weights * (of_weights - (output_gradient * output).sum(-1, keepdim=True))
    scale = 1 / math.sqrt(query.shape[-1])
    return Gradients(of_scores @ key * scale, of_scores.T @ query * scale, weights.T @ output_gradient, of_scores)


def all_to_the_largest(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute hard attention, in which each query puts all its weight on the key with the largest score."""
    return value[(query @ key.T).argmax(-1)]


def _weights(query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.T / math.sqrt(query.shape[-1])
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


@claim(
    latex=r"dV=A^\top dO,\quad dS=A\circ(dO\,V^\top-D),\quad dQ=\tfrac{1}{\sqrt{d_k}}dS\,K,"
    r"\quad dK=\tfrac{1}{\sqrt{d_k}}dS^\top Q",
    source="by differentiation; D as in Dao et al. 2022, arXiv:2205.14135, appendix B.2",
    verdict="holds",
    conditions="with a mask too: masked weights are 0, and so are their gradients. The gradients allow queries and "
    "keys to be trained by back-propagation: if the largest score gets all the weight, only the values get a gradient",
)
def attention_gradients(
    draw: Draw,
    *,
    backward: Callable[..., Gradients] = backward,
    attention: Callable[..., Tensor] = attention,
    hard: Callable[[Tensor, Tensor, Tensor], Tensor] = all_to_the_largest,
) -> Measurements:
    """Attention is differentiable, and its gradients with respect to query, key and value are a few matrix products."""
    q, k, v, upstream = draw.normal(7, 4), draw.normal(9, 4), draw.normal(9, 3), draw.normal(7, 3)
    inputs = [x[None, None].clone().requires_grad_() for x in (q, k, v)]
    output = attention(*inputs, Causal())
    seen = torch.autograd.grad(output, inputs, upstream[None, None])
    allowed = torch.arange(9) <= torch.arange(7)[:, None] + 2
    closed_form = backward(_weights(q, k, allowed), q, k, v, upstream)
    for name, formula, automatic in zip(("query", "key", "value"), closed_form[:3], seen, strict=True):
        yield same(Message("gradient of the {name}", name=Message(name)), formula, automatic[0, 0])
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    seen = torch.autograd.grad(hard(*inputs), inputs, upstream, materialize_grads=True)
    yield equal(
        "all weight on the largest score: gradient of query and key", float(sum(x.abs().max() for x in seen[:2])), 0.0
    )
    yield at_least("the same: gradient of the value", float(seen[2].abs().max()), 0.4)


@claim(latex=r"\sum_j (dS)_{ij}=0", source="the rows of softmax's Jacobian sum to 0", verdict="holds")
def score_gradients_sum_to_zero(draw: Draw, *, backward: Callable[..., Gradients] = backward) -> Measurements:
    """The gradients with respect to one query's scores sum to 0: raising all of its scores equally changes nothing."""
    q, k, v, upstream = draw.normal(7, 4), draw.normal(9, 4), draw.normal(9, 3), draw.normal(7, 3)
    weights = _weights(q, k, torch.ones(7, 9, dtype=torch.bool))
    gradients = backward(weights, q, k, v, upstream).scores
    yield same("sums of the rows of dS against 0", gradients.sum(-1), torch.zeros(7, dtype=torch.float64))
    yield apart("largest entry of dS, which is not 0 itself", float(gradients.abs().max()), 0.0, 1e-3)


@claim(
    latex=r"\frac{\partial O}{\partial V}=A^\top",
    source="tutorials; Magnus and Neudecker 2019, chapter 9, on layouts",
    verdict="holds if",
    conditions="it is read as a product with the gradient of O, dV = Aᵀ dO; the derivative itself has (n·d_v)·(m·d_v) "
    "entries and is A ⊗ I for rows laid out one after the other. Likewise, the derivative with respect to A is I ⊗ "
    "Vᵀ; it is Vᵀ only as the factor in dA = dO Vᵀ",
)
def value_jacobian_is_transposed_weights(
    draw: Draw,
    *,
    product: Callable[[Tensor, Tensor], Tensor] = lambda weights, upstream: weights.T @ upstream,
    kron: Callable[[Tensor, Tensor], Tensor] = torch.kron,
) -> Measurements:
    """The derivative of the output with respect to the values is the transposed matrix of weights."""
    weights, value, upstream = draw.normal(4, 6).softmax(-1), draw.normal(6, 3), draw.normal(4, 3)
    (seen,) = torch.autograd.grad(weights @ value.requires_grad_(), value, upstream)
    yield same("gradient of the value", product(weights, upstream), seen)
    every = torch.autograd.functional.jacobian(lambda v: weights @ v, value.detach()).reshape(12, 18)
    yield same("derivatives, against A ⊗ I", kron(weights, torch.eye(3, dtype=torch.float64)), every)
    by_weights = torch.autograd.functional.jacobian(lambda a: a @ value.detach(), weights).reshape(12, 24)
    expected = kron(torch.eye(4, dtype=torch.float64), value.detach().T.contiguous())
    yield same("derivatives by the weights, against I ⊗ Vᵀ", expected, by_weights)
