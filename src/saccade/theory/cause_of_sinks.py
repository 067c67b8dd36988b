"""Claim about the reason for attention sinks, with a small trained layer in which many queries have nothing to read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most

_LETTERS, _LENGTH, _WIDTH = 6, 12, 16

Weigh = Callable[[Tensor, Tensor], Tensor]
"""A function that returns weights, given scores ``[..., n, n]`` (-inf if masked) and one trained scalar per seed."""


def softmax(scores: Tensor, number: Tensor) -> Tensor:
    """Return the softmax of the scores; the trained scalar ``number`` is not used."""
    return scores.softmax(-1)


def with_sink_logit(scores: Tensor, number: Tensor, start: float = 0.0) -> Tensor:
    """Return softmax with the sink logit ``number + start``, an extra score whose weight goes to no key."""
    logit = (number + start)[:, None, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, logit], -1).softmax(-1)[..., :-1]


def sigmoid(scores: Tensor, number: Tensor) -> Tensor:
    """Return the sigmoid of the scores minus ln n, as weights that need not sum to 1."""
    return torch.sigmoid(scores - math.log(scores.shape[-1]))


class Sink(NamedTuple):
    """Measurements of the first token in trained layers, one number per seed.

    Attributes:
        weight: mean weight of the first token for queries with nothing to read.
        value: mean norm of its value after the readout, divided by the mean norm for the other tokens.
    """

    weight: Tensor
    value: Tensor


def trained_to_idle(weigh: Weigh, always: bool, seeds: int = 4) -> Sink:
    """Train a causal layer with squared errors to output the letter before each A, and zeros at other letters.

    A sequence consists of a start token and 11 random letters out of six. Adam takes 300 steps, for several seeds at
    once.

    Args:
        weigh: the function from scores to weights.
        always: whether the layer must output the previous letter at every letter, so that every query has something to
            read.
        seeds: number of training runs.
    """
    generator = Generator().manual_seed(0)

    def weight(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(seeds, *shape, generator=generator) * scale).requires_grad_()

    embedding, positions = weight(_LETTERS + 1, _WIDTH), weight(_LENGTH, _WIDTH, scale=0.5)
    maps, readout = weight(3, _WIDTH, _WIDTH, scale=_WIDTH**-0.5), weight(_WIDTH, _LETTERS, scale=_WIDTH**-0.5)
    number = torch.zeros(seeds, requires_grad=True)
    hidden = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).triu(1)

    def draw(examples: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(_LETTERS, (examples, _LENGTH), generator=generator)
        tokens[:, 0] = _LETTERS
        asks = (tokens == 0) | always
        asks[:, :2] = False  # no letter is before the first
        return tokens, asks

    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = embedding[:, tokens] + positions[:, None]
        query, key, value = (x @ maps[:, i, None] for i in range(3))
        scores = (query @ key.mT * _WIDTH**-0.5).masked_fill(hidden, -math.inf)
        return weigh(scores, number), value @ readout[:, None]

    weights = [embedding, positions, maps, readout, number]
    optimizer = torch.optim.Adam(weights, 0.02)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * step / 300))
        tokens, asks = draw(16)
        attended, value = run(tokens)
        wanted = one_hot(tokens.roll(1, 1) % _LETTERS, _LETTERS) * asks[..., None]
        optimizer.zero_grad()
        (attended @ value - wanted).square().sum(-1).flatten(1).mean(1).sum().backward()
        optimizer.step()
    with torch.no_grad():
        tokens, _ = draw(64)
        attended, value = run(tokens)
        lengths = value.norm(dim=-1)
        idle = tokens[:, 4:] != 0
        return Sink(
            attended[:, :, 4:, 0][:, idle].double().mean(1),
            (lengths[..., 0].mean(1) / lengths[..., 1:].mean((1, 2))).double(),
        )


@claim(
    "trained-layers",
    latex=r"\textstyle\sum_j A_{ij}=1\ \Rightarrow\ A_{i1}\to 1\ \text{for queries that need nothing}",
    source="Gu et al. 2024, arXiv:2410.10781; Xiao et al. 2023, arXiv:2309.17453, section 3.1; for such a "
    "task Guo et al. 2024, arXiv:2410.13835",
    verdict="holds if",
    conditions="many queries have nothing to read, as in this task: a layer then gives the first token nearly all "
    "their weight, and a value near 0. With sigmoid weights, with a sink logit that starts at 5, or with something to "
    "read for every query, there is no sink. A sink logit that starts at 0 need not prevent it",
)
def sinks_come_of_having_to_sum_to_one(
    draw: Draw,
    *,
    weigh: Weigh = softmax,
    free: Weigh = sigmoid,
    logit: Callable[[Tensor, Tensor, float], Tensor] = with_sink_logit,
    busy: bool = True,
) -> Measurements:
    """Attention sinks arise because weights must sum to 1: a query that needs nothing must put its weight somewhere."""
    sink = trained_to_idle(weigh, always=False)
    yield at_least("softmax: weight of the first token, median of 4 seeds", float(sink.weight.median()), 0.9)
    yield at_most("the same: length of its value over that of others", float(sink.value.median()), 0.05)
    yield at_most(
        "softmax, something to read for every query: the weight",
        float(trained_to_idle(weigh, busy).weight.median()),
        0.1,
    )
    yield at_most("sigmoid: the weight", float(trained_to_idle(free, always=False).weight.median()), 0.1)

    def with_logit(start: float) -> Tensor:
        return trained_to_idle(lambda scores, number: logit(scores, number, start), always=False).weight

    high, low = with_logit(5.0), with_logit(0.0)
    yield at_most("softmax with a sink logit from 5: the weight", float(high.median()), 0.1)
    yield at_least("softmax with a sink logit from 0: the weight, largest of 4 seeds", float(low.max()), 0.9)
