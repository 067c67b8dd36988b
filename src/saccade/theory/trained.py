"""Small layers trained for a claim, with several seeds at once, which takes little longer than one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from saccade.matrix import attention

_CLASSES = 8


class Task(NamedTuple):
    """A task to learn.

    Attributes:
        draw: draws examples from a generator: tokens ``[examples, n, fields]``, whose vectors are added, and answers
            ``[examples, places, answers]`` out of eight.
        read: selects the logits of the answers, ``[..., n, answers, 8]`` to ``[..., places, answers, 8]``.
        vocab_size: number of tokens.
        length: number of tokens, n.
        answers: number of answers per place.
    """

    draw: Callable[[int, Generator], tuple[Tensor, Tensor]]
    read: Callable[[Tensor], Tensor]
    vocab_size: int
    length: int
    answers: int


def neighbours(*back: int) -> Task:
    """Predict the tokens, out of eight, at fixed distances back from every place."""
    length, first = 16, max(back)

    def draw(examples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(_CLASSES, (examples, length), generator=generator)
        return tokens[..., None], torch.stack([tokens.roll(by, 1) for by in back], -1)[:, first:]

    return Task(draw, lambda logits: logits[..., first:, :, :], _CLASSES, length, len(back))


def recall(keys: int = 32, pairs: int = 16) -> Task:
    """Read pairs of a key and one of eight values, then one of the keys; predict its value."""

    def draw(examples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        key = torch.rand(examples, keys, generator=generator).argsort(1)[:, :pairs]
        value = torch.randint(_CLASSES, (examples, pairs), generator=generator)
        place = torch.randint(pairs, (examples, 1), generator=generator)
        asked = torch.full((examples, 1), keys + _CLASSES)
        tokens = torch.stack([torch.cat([key, key.gather(1, place)], 1), torch.cat([keys + value, asked], 1)], -1)
        return tokens, value.gather(1, place)[..., None]

    return Task(draw, lambda logits: logits[..., -1:, :, :], keys + _CLASSES + 1, pairs + 1, 1)


def triples() -> Task:
    """Predict which of eight triples occurs among random tokens."""
    length = 16
    planted = torch.randint(_CLASSES, (_CLASSES, 3), generator=Generator().manual_seed(1))

    def draw(examples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(_CLASSES, (examples, length), generator=generator)
        answer = torch.randint(_CLASSES, (examples, 1), generator=generator)
        place = torch.randint(length - 2, (examples, 1), generator=generator) + torch.arange(3)
        return tokens.scatter(1, place, planted[answer[:, 0]])[..., None], answer[..., None]

    return Task(draw, lambda logits: logits.amax(-3, keepdim=True), _CLASSES, length, 1)


Layer = Callable[[Tensor, Tensor], Tensor]
"""What mixes tokens ``[seeds, examples, n, width]`` with four matrices ``[seeds, 4, width, width]``."""


def attentive(heads: int) -> Layer:
    """Apply self-attention: the four matrices project to queries, keys, values and the output."""

    def mix(x: Tensor, weights: Tensor) -> Tensor:
        made = (x @ weights[:, i, None] for i in range(3))
        query, key, value = (one.flatten(0, 1).unflatten(-1, (heads, -1)).transpose(1, 2) for one in made)
        out = attention(query, key, value).transpose(1, 2).flatten(2).unflatten(0, x.shape[:2])
        return out @ weights[:, 3, None]

    return mix


def convolution(x: Tensor, weights: Tensor) -> Tensor:
    """Apply a convolution over three places: the matrices are its taps and the output."""
    taps = ((0, 1), (1, 0), (2, -1))
    return sum((x.roll(by, 2) @ weights[:, i, None] for i, by in taps), torch.zeros_like(x)) @ weights[:, 3, None]


class Learned(NamedTuple):
    """Results of training, one per seed.

    Attributes:
        accuracy: share of right answers on 1,024 new examples.
        loss: cross-entropy in nats, mean of the last 20 steps.
    """

    accuracy: Tensor
    loss: Tensor


def learned(
    layer: Layer,
    task: Task,
    *,
    steps: int,
    rate: float,
    seeds: int = 4,
    width: int = 32,
    examples: int | None = None,
    activation: Callable[[Tensor], Tensor] = torch.Tensor.clone,
) -> Learned:
    """Train a layer between an embedding and a linear readout, with Adam, from several seeds at once.

    Args:
        layer: mixes the tokens.
        task: the task to learn.
        steps: number of steps with 32 examples each.
        rate: the learning rate; it falls to 0 along a cosine.
        seeds: number of trainings.
        width: of tokens and layer.
        examples: size of the training set; None draws new examples in every step.
        activation: between layer and readout.
    """
    begin, data = Generator().manual_seed(0), Generator().manual_seed(1)

    def weight(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(seeds, *shape, generator=begin) * scale).requires_grad_()

    embedding, places = weight(task.vocab_size, width), weight(task.length, width, scale=0.5)
    mixing, readout = weight(4, width, width, scale=width**-0.5), weight(width, 8 * task.answers, scale=width**-0.5)
    weights = [embedding, places, mixing, readout]

    def logits(tokens: Tensor) -> Tensor:
        x = embedding[:, tokens].sum(-2) + places[:, None]
        mixed = activation(layer(x, mixing))
        return task.read((mixed @ readout[:, None]).unflatten(-1, (task.answers, 8)))

    pool = None if examples is None else task.draw(examples, data)
    optimizer = torch.optim.Adam(weights, rate)
    losses: list[Tensor] = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        if pool is None:
            tokens, answers = task.draw(32, data)
        else:
            chosen = torch.randint(len(pool[0]), (32,), generator=data)
            tokens, answers = (one[chosen] for one in pool)
        loss = -logits(tokens).log_softmax(-1).gather(-1, answers.expand(seeds, *answers.shape)[..., None])
        own = loss.flatten(1).mean(1)
        optimizer.zero_grad()
        own.sum().backward()
        optimizer.step()
        losses.append(own.detach())
    tokens, answers = task.draw(1024, Generator().manual_seed(2))
    with torch.no_grad():
        right = logits(tokens).argmax(-1) == answers
    return Learned(right.flatten(1).double().mean(1), torch.stack(losses[-20:]).double().mean(0))
