"""Paths: how far apart two tokens may stand and still reach each other, and how strongly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from saccade.attention import attention
from saccade.masks import Causal
from saccade.theory.claim import claim
from saccade.theory.draw import Draw
from saccade.theory.measurement import Measurements, at_least, at_most, equal

__all__ = ["attending", "convolutions", "influence", "lstm"]

_WIDTH, _LENGTH = 16, 65


def influence(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """How strongly the last output depends on each input: norms of gradients, ``[batch, len]``, the nearest first.

    The gradient is that of a random projection of the last output.
    """
    x = x.clone().requires_grad_()
    out = layer(x)[:, -1]
    (gradient,) = torch.autograd.grad((out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).sum(), x)
    return gradient.norm(dim=-1).flip(-1)


def lstm(draw: Draw, forget_bias: float = 0.0) -> Callable[[Tensor], Tensor]:
    """An LSTM as torch initialises it, plus a bias of the forget gate."""
    network = draw.module(lambda: nn.LSTM(_WIDTH, _WIDTH, batch_first=True))
    with torch.no_grad():
        dict(network.named_parameters())["bias_ih_l0"][_WIDTH : 2 * _WIDTH] += forget_bias

    def run(x: Tensor) -> Tensor:
        states: Tensor = network(x)[0]
        return states

    return run


def convolutions(draw: Draw, layers: int, kernel_size: int = 3) -> Callable[[Tensor], Tensor]:
    """Causal convolutions on top of one another."""
    stack = [draw.module(lambda: nn.Conv1d(_WIDTH, _WIDTH, kernel_size)) for _ in range(layers)]

    def run(x: Tensor) -> Tensor:
        x = x.mT
        for one in stack:
            x = torch.tanh(one(nn.functional.pad(x, (kernel_size - 1, 0))))
        return x.mT

    return run


def attending(draw: Draw) -> Callable[[Tensor], Tensor]:
    """Causal self-attention, without an output projection."""
    maps = [draw.normal(_WIDTH, _WIDTH) / _WIDTH**0.5 for _ in range(3)]

    def run(x: Tensor) -> Tensor:
        query, key, value = ((x @ one)[:, None] for one in maps)
        return attention(query, key, value, Causal())[:, 0]

    return run


@claim(
    latex=r"\Bigl\lVert\frac{\partial o_n}{\partial x_{n-t}}\Bigr\rVert\ \text{does not depend on}\ t",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, table 1",
    verdict="holds if",
    conditions="nothing in the scores depends on distance; each of n tokens has a share of about 1/n of the influence",
)
def distance_does_not_matter(
    draw: Draw, *, layer: Callable[[Draw], Callable[[Tensor], Tensor]] = attending
) -> Measurements:
    """Attention reaches every token in one step, and the far ones as strongly as the near ones."""
    found = influence(layer(draw), draw.normal(256, _LENGTH, _WIDTH))
    near, far = found[:, 1:17].mean(), found[:, -16:].mean()
    yield equal("influence of tokens 49 to 64 away, against 1 to 16", float(far / near), 1.0, 0.35, "256 sequences")
    yield at_least("smallest influence in 256 sequences", float(found.min()), 1e-12)
    yield at_most("share of one far token in all influence", float((found[:, -1] / found.sum(-1)).mean()), 4 / _LENGTH)


@claim(
    latex=r"\Bigl\lVert\frac{\partial h_n}{\partial x_{n-t}}\Bigr\rVert\to 0",
    source="tutorials; Hochreiter 1991, Bengio et al. 1994; the forget gate: Gers et al. 2000",
    verdict="holds if",
    conditions="the network is as it is initialised: with a forget gate that stays open (a bias of 6) little is lost "
    "over 64 steps",
)
def recurrent_influence_fades(draw: Draw, *, network: Callable[..., Callable[[Tensor], Tensor]] = lstm) -> Measurements:
    """In a recurrent network the influence of a token fades with its distance."""
    x = draw.normal(64, _LENGTH, _WIDTH)
    found = influence(network(draw), x).mean(0)
    yield at_most("LSTM: influence 64 steps away, against 1 step", float(found[64] / found[1]), 1e-6)
    half = (found[1:33].log().diff().mean(), found[32:65].log().diff().mean())
    yield equal("decay per step, second half against first", float(half[1] / half[0]), 1.0, 0.5, "exponential")
    kept = influence(network(draw, 6.0), x).mean(0)
    yield at_least("the same with a forget bias of 6", float(kept[64] / kept[1]), 0.05)


@claim(
    latex=r"\frac{\partial o_n}{\partial x_{n-t}}=0\ \text{for}\ t>L(k-1)",
    source="tutorials; Vaswani et al. 2017, arXiv:1706.03762, table 1",
    verdict="holds",
    conditions="without strides and dilations, which reach further",
)
def convolutions_are_local(
    draw: Draw, *, network: Callable[..., Callable[[Tensor], Tensor]] = convolutions
) -> Measurements:
    """A stack of L convolutions of width k sees L (k - 1) steps back, and nothing beyond."""
    x = draw.normal(4, _LENGTH, _WIDTH)
    for layers in (1, 4):
        found = influence(network(draw, layers), x)
        reach = int((found.amax(0) > 0).nonzero().max())
        yield equal(f"furthest token with an influence, {layers} layers of width 3", reach, 2 * layers)
