"""Claims about training small layers, and the tasks and layers with which they are checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from saccade.matrix import attention
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal, same

_CLASSES = 8


class Task(NamedTuple):
    """A training task with short sequences, for a small layer.

    Attributes:
        draw: a function that draws a number of examples with a generator. It returns tokens ``[examples, n, fields]``,
            where the embeddings of all fields are summed, and answers ``[examples, positions, answers]`` from 0 to 7.
        read: a function that selects the answers' logits: ``[..., n, answers, 8]`` to ``[..., positions, answers, 8]``.
        vocab_size: number of different tokens.
        length: number of tokens in an example, n.
        answers: number of answers per position.
    """

    draw: Callable[[int, Generator], tuple[Tensor, Tensor]]
    read: Callable[[Tensor], Tensor]
    vocab_size: int
    length: int
    answers: int


def neighbours(*back: int) -> Task:
    """Return the training task of predicting the tokens (out of eight) at fixed distances before each position."""
    length, first = 16, max(back)

    def draw(examples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(_CLASSES, (examples, length), generator=generator)
        return tokens[..., None], torch.stack([tokens.roll(by, 1) for by in back], -1)[:, first:]

    return Task(draw, lambda logits: logits[..., first:, :, :], _CLASSES, length, len(back))


def recall(keys: int = 32, pairs: int = 16) -> Task:
    """Return the training task of recalling the value (out of eight) of a key after a sequence of key-value pairs."""

    def draw(examples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        key = torch.rand(examples, keys, generator=generator).argsort(1)[:, :pairs]
        value = torch.randint(_CLASSES, (examples, pairs), generator=generator)
        index = torch.randint(pairs, (examples, 1), generator=generator)
        query = torch.full((examples, 1), keys + _CLASSES)
        tokens = torch.stack([torch.cat([key, key.gather(1, index)], 1), torch.cat([keys + value, query], 1)], -1)
        return tokens, value.gather(1, index)[..., None]

    return Task(draw, lambda logits: logits[..., -1:, :, :], keys + _CLASSES + 1, pairs + 1, 1)


def triples() -> Task:
    """Return the training task of predicting which of eight triples occurs among random tokens."""
    length = 16
    planted = torch.randint(_CLASSES, (_CLASSES, 3), generator=Generator().manual_seed(1))

    def draw(examples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(_CLASSES, (examples, length), generator=generator)
        answer = torch.randint(_CLASSES, (examples, 1), generator=generator)
        positions = torch.randint(length - 2, (examples, 1), generator=generator) + torch.arange(3)
        return tokens.scatter(1, positions, planted[answer[:, 0]])[..., None], answer[..., None]

    return Task(draw, lambda logits: logits.amax(-3, keepdim=True), _CLASSES, length, 1)


def both_from_one_sum(summed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of two tokens, ``[..., 8]`` each, from 2/3 of the first one-hot vector plus 1/3 of the second.

    The second token needs a relu layer, because entries of 1/3 and 1 indicate it, but an entry of 2/3 does not.
    """
    return summed, summed - 2 * torch.relu(summed - 1 / 3) + 4 * torch.relu(summed - 2 / 3)


Layer = Callable[[Tensor, Tensor], Tensor]
"""A function that mixes tokens ``[seeds, examples, n, width]`` by four matrices ``[seeds, 4, width, width]``."""


def attentive(heads: int, scale: float | None = None) -> Layer:
    """Return a self-attention layer to train. Its four matrices project to queries, keys, values and the output.

    Args:
        heads: number of heads.
        scale: the factor for the scores; 1/√d_k when None.
    """

    def mix(x: Tensor, weights: Tensor) -> Tensor:
        projected = (x @ weights[:, i, None] for i in range(3))
        query, key, value = (part.flatten(0, 1).unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected)
        out = attention(query, key, value, scale=scale).transpose(1, 2).flatten(2).unflatten(0, x.shape[:2])
        return out @ weights[:, 3, None]

    return mix


def convolution(x: Tensor, weights: Tensor) -> Tensor:
    """Apply a convolution over three positions. Its four matrices are the three taps and the output projection."""
    taps = ((0, 1), (1, 0), (2, -1))
    return sum((x.roll(by, 2) @ weights[:, i, None] for i, by in taps), torch.zeros_like(x)) @ weights[:, 3, None]


class Learned(NamedTuple):
    """Results of training a small layer, one per seed.

    Attributes:
        accuracy: share of correct answers on 1,024 new examples.
        loss: cross-entropy in nats, averaged over the last 20 steps.
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
    start: float = 1.0,
) -> Learned:
    """Train a layer between an embedding and a linear readout with Adam, for several seeds at once.

    Args:
        layer: the layer that mixes tokens.
        task: the task to learn.
        steps: number of training steps, with 32 examples each.
        rate: the initial learning rate, which falls to 0 along a cosine.
        seeds: number of training runs.
        width: the width of the tokens and the layer.
        examples: size of the training set; if None, new examples are drawn in every step.
        activation: a function applied between the layer and the readout.
        start: a factor for the initial weights of the first of the layer's four matrices, the query projection.
    """
    begin, data = Generator().manual_seed(0), Generator().manual_seed(1)

    def weight(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(seeds, *shape, generator=begin) * scale).requires_grad_()

    embedding, positions = weight(task.vocab_size, width), weight(task.length, width, scale=0.5)
    mixing, readout = weight(4, width, width, scale=width**-0.5), weight(width, 8 * task.answers, scale=width**-0.5)
    weights = [embedding, positions, mixing, readout]
    with torch.no_grad():
        mixing[:, 0] *= start

    def logits(tokens: Tensor) -> Tensor:
        x = embedding[:, tokens].sum(-2) + positions[:, None]
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
            batch = torch.randint(len(pool[0]), (32,), generator=data)
            tokens, answers = (part[batch] for part in pool)
        loss = -logits(tokens).log_softmax(-1).gather(-1, answers.expand(seeds, *answers.shape)[..., None])
        per_seed = loss.flatten(1).mean(1)
        optimizer.zero_grad()
        per_seed.sum().backward()
        optimizer.step()
        losses.append(per_seed.detach())
    tokens, answers = task.draw(1024, Generator().manual_seed(2))
    with torch.no_grad():
        right = logits(tokens).argmax(-1) == answers
    return Learned(right.flatten(1).double().mean(1), torch.stack(losses[-20:]).double().mean(0))


@claim(
    latex=r"\mathrm{loss}(h\ \text{heads})<\mathrm{loss}(1\ \text{head})",
    source="tutorials, by experience; Vaswani et al. 2017, arXiv:1706.03762, table 3, row A, where both 1 and 32 heads "
    "are worse than 8; for thin heads Bhojanapalli et al. 2020, arXiv:2002.07028",
    verdict="holds if",
    conditions="the needed tokens are at several positions at once and the readout is linear: two or four heads then "
    "identify two neighbours, one head never does. A relu layer after one head with weights 2/3 and 1/3 identifies "
    "both. To find one position among many, a wide head is better than narrow ones of the same total width",
)
def several_heads_beat_one(
    draw: Draw,
    *,
    layer: Callable[[int], Layer] = attentive,
    weights: tuple[float, float] = (2 / 3, 1 / 3),
    readout: Callable[[Tensor], tuple[Tensor, Tensor]] = both_from_one_sum,
) -> Measurements:
    """Several heads do better than one of the same total width."""

    def accuracy(heads: int, task: Task, width: int, rate: float, steps: int) -> torch.Tensor:
        return learned(layer(heads), task, width=width, rate=rate, steps=steps).accuracy

    both = neighbours(1, 2)
    one, two, four = (accuracy(heads, both, 32, 0.01, 200) for heads in (1, 2, 4))
    yield at_most("both neighbours, one head of 32: accuracy, best of 4 seeds", float(one.max()), 0.75)
    yield at_least("both neighbours, two heads of 16: accuracy, worst of 4 seeds", float(two.min()), 0.95)
    yield at_least("both neighbours, four heads of 8: accuracy, worst of 4 seeds", float(four.min()), 0.95)
    first, second = torch.cartesian_prod(torch.arange(_CLASSES), torch.arange(_CLASSES)).unbind(-1)
    one_hot = torch.eye(_CLASSES, dtype=torch.float64)
    of_first, of_second = readout(weights[0] * one_hot[first] + weights[1] * one_hot[second])
    right = (of_first.argmax(-1) == first) & (of_second.argmax(-1) == second)
    yield equal(
        "one head with weights 2/3 and 1/3, then a relu layer: accuracy on all pairs", float(right.double().mean()), 1.0
    )
    wide, thin = (accuracy(heads, recall(), 16, 0.03, 400) for heads in (1, 8))
    yield at_least("one of 16 keys, one head of 16: accuracy, worst of 4 seeds", float(wide.min()), 0.95)
    yield at_most("one of 16 keys, eight heads of 2: accuracy, best of 4 seeds", float(thin.max()), 0.85)


@claim(
    latex=r"\mathrm{softmax}\bigl(QK^\top/\sqrt{d_k}\bigr)=\mathrm{softmax}\bigl(Q'K^\top\bigr),\quad "
    r"W_Q'=W_Q/\sqrt{d_k}",
    source="tutorials (the necessity of scaling); Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1, which suspects "
    "small gradients",
    verdict="holds if",
    conditions="it refers to the start of training, with entries of q and k of variance about 1, and to a task in "
    "which one of many tokens must be found: a layer without the scale then learns hardly more than chance. For what "
    "a layer can compute, the scale is not necessary: W_Q can include it. If W_Q starts smaller by 1/√d_k, an easy "
    "task is learned without the scale; a harder one is not at the same rate of Adam, whose steps do not become "
    "smaller with the weights",
)
def scaling_is_necessary(
    draw: Draw,
    *,
    attend: Callable[..., Tensor] = attention,
    layer: Callable[[float | None], Layer] = lambda scale: attentive(1, scale),
    start: float = 32**-0.5,
) -> Measurements:
    """Scaling is necessary: without it, training is hard and unsteady."""
    x, of_query, of_key = draw.normal(1, 1, 12, 32), draw.normal(32, 32), draw.normal(32, 32)
    scaled = attend(x @ of_query, x @ of_key, x)
    unscaled = attend(x @ of_query * 32**-0.5, x @ of_key, x, scale=1.0)
    yield same("W_Q divided by √d_k and no scale: output, against that with the scale", unscaled, scaled)

    def accuracy(task: Task, scale: float | None, start: float = 1.0, seeds: int = 2) -> Tensor:
        return learned(layer(scale), task, steps=200, rate=0.01, start=start, seeds=seeds).accuracy

    far, near = recall(), neighbours(1)
    yield at_least("one of 16 keys, scaled: accuracy, worse of 2 seeds", float(accuracy(far, None).min()), 0.9)
    yield at_most("one of 16 keys, no scale: accuracy, better of 2 seeds", float(accuracy(far, 1.0).max()), 0.3)
    yield at_least("the token before, scaled: accuracy, worse of 2 seeds", float(accuracy(near, None).min()), 0.95)
    unsteady = accuracy(near, 1.0, seeds=4)
    yield at_least(
        "the token before, no scale: accuracy of the best of 4 seeds less that of the worst",
        float(unsteady.max() - unsteady.min()),
        0.5,
    )
    smaller = accuracy(near, 1.0, start)
    yield at_least("the same, W_Q started smaller by 1/√d_k: accuracy, worse of 2 seeds", float(smaller.min()), 0.95)
    hard = float(accuracy(far, 1.0, start).max())
    yield at_most("one of 16 keys, no scale, W_Q started smaller: accuracy, better of 2 seeds", hard, 0.3)


@claim(
    latex=r"\mathrm{Var}_{\text{seed}}(h\ \text{heads})<\mathrm{Var}_{\text{seed}}(1\ \text{head})",
    source="tutorials",
    verdict="holds if",
    conditions="the learning rate is so high that one head no longer learns: more of the seeds learn with eight. At a "
    "third of that rate, all seeds learn either way, and there is no instability to reduce",
)
def several_heads_train_more_steadily(draw: Draw, *, layer: Callable[[int], Layer] = attentive) -> Measurements:
    """Several heads make training more stable."""

    def num_learning(heads: int, rate: float) -> int:
        accuracy = learned(layer(heads), neighbours(1), steps=200, rate=rate, seeds=8).accuracy
        return int((accuracy > 0.9).sum())

    yield equal("rate 0.03, one head: of 8 seeds, how many learn", num_learning(1, 0.03), 8)
    yield equal("rate 0.03, eight heads: of 8 seeds, how many learn", num_learning(8, 0.03), 8)
    yield at_least(
        "rate 0.1: how many more seeds learn with eight heads", num_learning(8, 0.1) - num_learning(1, 0.1), 3
    )


@claim(
    latex=r"N_{\text{attention}}\gg N_{\text{convolution}}",
    source="tutorials; Dosovitskiy et al. 2021, arXiv:2010.11929, section 4.3, for images",
    verdict="holds if",
    conditions="the task depends on neighbours, which a convolution reads from the start. If it depends on tokens "
    "anywhere, attention learns from examples from which a convolution learns nothing",
)
def attention_needs_much_data(
    draw: Draw, *, layer: Callable[[int], Layer] = attentive, other: Layer = convolution
) -> Measurements:
    """Attention needs more training examples than other networks."""

    def near(layer: Layer, examples: int) -> float:
        run = learned(layer, triples(), steps=400, rate=0.01, examples=examples, activation=torch.relu)
        return float(run.accuracy.mean())

    def far(layer: Layer, examples: int) -> float:
        return float(learned(layer, recall(), steps=400, rate=0.01, examples=examples).accuracy.mean())

    few = near(other, 512)
    yield at_least("triples, a convolution: accuracy from 512 examples", few, 0.65)
    yield at_most("triples, attention: accuracy from 512 examples", near(layer(4), 512), 0.45)
    yield at_most(
        "triples, attention: accuracy from 4,096, against the convolution's from 512", near(layer(4), 4096) - few, -0.1
    )
    yield at_least("recall, attention: accuracy from 512 examples", far(layer(1), 512), 0.6)
    yield apart("recall, a convolution from 4,096: accuracy, against attention's", far(other, 4096), 1.0, 0.7)
