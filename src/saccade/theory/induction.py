"""Claims about functions of whole sequences: induction takes two layers, and one token has little influence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from saccade.masks import Causal
from saccade.matrix import attention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most, equal
from saccade.theory.trained_layers import Layer, Task, attentive, learned


def repeated(draw: Draw, half: int) -> Tensor:
    """Return a sequence of ``half`` distinct tokens in random order, followed by the same tokens in the same order."""
    return draw.permutation(half).repeat(2)


def next_by_induction(tokens: Tensor, layers: int = 2, attend: Callable[..., Tensor] = attention) -> Tensor:
    """Predict the token after each token with layers built by hand, int64 ``[n]``.

    The first layer attends to the previous token and stores it. The last layer attends to the token whose stored token
    equals the current one, and copies it. This is the token that followed an earlier occurrence. With one layer,
    nothing is stored.
    """
    n = len(tokens)
    one_hot = torch.nn.functional.one_hot(tokens).double()
    positions = torch.eye(n, dtype=torch.float64)
    stored = torch.zeros_like(one_hot)
    if layers == 2:
        before = positions.roll(1, 0)[None, None]  # the query of position i is the key of position i - 1
        stored = attend(100 * before, positions[None, None], one_hot[None, None], Causal(), scale=1.0)[0, 0]
        stored[0] = 0.0  # no token is before the first
    copied = attend(100 * one_hot[None, None], stored[None, None], one_hot[None, None], Causal(), scale=1.0)
    return copied[0, 0].argmax(-1)


def following(length: int = 8) -> Task:
    """Return the training task of predicting the token (out of eight) that followed the last token's earlier copy."""

    def draw(examples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.rand(examples, length, generator=generator).argsort(1)
        position = torch.randint(length - 1, (examples, 1), generator=generator)
        return torch.cat([tokens, tokens.gather(1, position)], 1)[..., None], tokens.gather(1, position + 1)[..., None]

    return Task(draw, lambda logits: logits[..., -1:, :, :], length, length + 1, 1)


@claim(
    "universality",
    latex=r"\ldots a\,b\ldots a\to b:\ \text{two layers}",
    source="Olsson et al. 2022, arXiv:2209.11895; that one layer must be far wider: "
    "Sanford et al. 2024, arXiv:2408.14332",
    verdict="holds if",
    conditions="the layers are narrow: a single layer can solve short sequences if its width grows with their length, "
    "as a key must know the token before it when it is compared. Built by hand, two layers solve any length; trained, "
    "one layer of width 32 finds the answer among nine tokens hardly more often than by chance",
)
def induction_takes_two_layers(
    draw: Draw,
    *,
    predict: Callable[..., Tensor] = next_by_induction,
    layer: Callable[[int], Layer] = attentive,
) -> Measurements:
    """Continuing a repeated sequence (induction) takes two layers: several layers combine simple operations."""

    def accuracy(half: int, layers: int) -> float:
        tokens = repeated(draw, half)
        return float((predict(tokens, layers)[half:-1] == tokens[half + 1 :]).double().mean())

    for half in (4, 32, 256):
        yield equal(Message("two layers built by hand, n = {n}: accuracy", n=2 * half), accuracy(half, 2), 1.0)
    yield at_most("the second of them alone, n = 512: accuracy", accuracy(256, 1), 0.1)
    one = learned(layer(4), following(), steps=200, rate=0.01, activation=torch.relu).accuracy
    yield at_most("one trained layer, 9 tokens: accuracy, best of 4 seeds", float(one.max()), 0.4)


def _last_output(tokens: Tensor, maps: list[Tensor]) -> Tensor:
    query, key, value = (tokens[None, None] @ weight for weight in maps)
    return attention(query[:, :, -1:], key, value)[0, 0, 0]


@claim(
    "universality",
    latex=r"\lVert o_n(X)-o_n(X')\rVert=O(1/n)\ \text{if}\ X, X'\ \text{differ in one token}",
    source="Hahn 2020, arXiv:1906.06755, lemma 5",
    verdict="holds if",
    conditions="tokens and weights are bounded as n grows, and the token that changes is not the query's own. So the "
    "margin of a function that one token can flip, such as parity, falls as 1/n: at a fixed length, a later layer can "
    "still distinguish the outputs, but one set of bounded weights becomes less certain as the length grows. Scores "
    "that grow as log n, or hard attention, escape the bound",
)
def one_token_has_little_say(
    draw: Draw, *, output: Callable[[Tensor, list[Tensor]], Tensor] = _last_output
) -> Measurements:
    """One token has little influence: it changes the output of softmax attention by O(1/n)."""
    width, samples = 8, 40
    maps = [draw.normal(width, width) / width**0.5 for _ in range(3)]
    changes, bounds = {}, []
    for n in (64, 1024):
        seen = []
        for _ in range(samples):
            tokens = torch.nn.functional.normalize(draw.normal(n, width), dim=-1)
            other = tokens.clone()
            other[0] = torch.nn.functional.normalize(draw.normal(width), dim=-1)
            seen.append(float((output(tokens, maps) - output(other, maps)).norm()))
            # |s| ≤ c for all scores, so no weight exceeds e^(2c)/n; one weight changes the others by at most as much.
            largest = float(torch.linalg.matrix_norm(maps[0] @ maps[1].T, 2)) / width**0.5
            bounds.append(
                seen[-1] * n / (4 * float(torch.linalg.matrix_norm(maps[2], 2)) * torch.tensor(2 * largest).exp())
            )
        changes[n] = sum(seen) / samples
    yield equal(
        "change of the output when one token changes, n = 1,024, over n = 64",
        changes[1024] / changes[64],
        1 / 16,
        0.03,
        "the law 1/n, 40 sequences",
    )
    yield at_most("largest change, over the bound 4 e^(2c) |W_v| / n", float(max(bounds)), 1.0)
    yield at_least("the same", float(max(bounds)), 0.01)
