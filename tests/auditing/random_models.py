"""Right models of random architectures: attention, convolutions, shifts, recurrences, experts and images."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from tests.auditing.small_transformer import Layer, Mixer, Small
from torch import Tensor, nn
from torch.nn import functional as F

from saccade import masks

WIDTH, VOCABULARY = 16, 40


class Drawn(NamedTuple):
    """A right model, the rule that it keeps, its inputs, and how it was drawn."""

    model: nn.Module
    rule: masks.Mask
    inputs: Tensor
    words: str


class Convolution(nn.Module):
    """A causal convolution, perhaps dilated, within texts of the given lengths."""

    def __init__(self, lengths, size=3, dilation=1):
        super().__init__()
        self.lengths, self.back = lengths, (size - 1) * dilation
        self.conv = nn.Conv1d(WIDTH, WIDTH, size, dilation=dilation)

    def forward(self, x):
        return torch.cat([self.conv(F.pad(one.mT, (self.back, 0))).mT for one in x.split(self.lengths, 1)], 1)


class Shift(nn.Module):
    """A part of the channels of the token before, of the same text."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths, self.scale = lengths, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        shifted = torch.cat([F.pad(one, (0, 0, 1, 0))[:, :-1] for one in x.split(self.lengths, 1)], 1)
        return self.scale * torch.cat([x[..., : WIDTH // 2], shifted[..., WIDTH // 2 :]], -1)


class Recurrence(nn.Module):
    """A gated sum of the tokens so far, which starts anew with each text."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths, self.gate, self.value = lengths, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.cat([self.read(one) for one in x.split(self.lengths, 1)], 1)

    def read(self, x):
        state, rows = torch.zeros_like(x[:, 0]), []
        for gate, value in zip(self.gate(x).sigmoid().unbind(1), self.value(x).unbind(1), strict=True):
            state = gate * state + (1 - gate) * value
            rows.append(state)
        return torch.stack(rows, 1)


class Experts(nn.Module):
    """Each token passes the two of three experts that its router prefers."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.router(x).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights.softmax(-1) * (chosen == number)).sum(-1)
            rows = weight > 0
            out[rows] = out[rows] + expert(x[rows]) * weight[rows][:, None]
        return out


class Patches(nn.Module):
    """A model of two tokens of text and the patches of an image, which attends to all or to patches nearby."""

    def __init__(self, layers, rule):
        super().__init__()
        self.body = Small([rule] * layers, width=WIDTH)
        self.patches = nn.Linear(12, WIDTH)

    def forward(self, pixels):
        x = self.patches(pixels)
        for layer in self.body.layers:
            x = layer(x)
        return self.body.head(x)


def draw(seed: int) -> Drawn:
    """Draw a right model."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    layers, length = pick.randint(1, 4), pick.choice((16, 24, 31))
    if pick.random() < 0.15:
        return _images(pick, layers)
    lengths = [length] if pick.random() < 0.6 else [length // 3, length - length // 3]
    within = pick.choice((masks.Causal(), masks.Causal() & masks.Window(pick.randint(1, 7), 0)))
    rule = within if len(lengths) == 1 else masks.Documents(lengths, rule=within)
    words, changed = [str(rule)], {}
    for place in range(layers):
        kind = pick.choice(("attention", "attention", "convolution", "shift", "recurrence", "experts", "beside"))
        is_wide = within == masks.Causal()
        words.append(kind)
        attention = Mixer(WIDTH, rule)
        wide = Recurrence(lengths) if is_wide else Shift(lengths)
        near = pick.choice((Convolution(lengths, 2), Shift(lengths)))
        near = pick.choice((near, Convolution(lengths, 3, dilation=2))) if is_wide else near
        other = {"convolution": near, "shift": Shift(lengths), "recurrence": wide}.get(kind)
        if kind == "beside":
            changed[place] = Layer(WIDTH, attention, feed=near)
        elif kind == "experts":
            changed[place] = Layer(WIDTH, attention, feed=Experts())
        elif other is not None and place:  # the first layer attends, so that a rule is about some module
            changed[place] = Layer(WIDTH, other)
    model = Small([rule] * layers, changed, width=WIDTH, vocab=VOCABULARY).eval()
    ids = torch.randint(VOCABULARY, (2, length))
    return Drawn(model, rule, ids, ", ".join(words))


def _images(pick: random.Random, layers: int) -> Drawn:
    side = pick.choice((3, 4))
    rule = pick.choice((masks.Full(), masks.image_neighbors(2, side, side, 1)))
    pixels = torch.randn(2, 2 + side * side, 12)
    return Drawn(Patches(layers, rule).eval(), rule, pixels, f"images, {rule}")
