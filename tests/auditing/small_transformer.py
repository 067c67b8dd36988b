"""A small transformer in plain torch, each layer of which sees what a mask says, and faults to put into one."""

import torch
from torch import nn

from saccade import masks


class Mixer(nn.Module):
    """Attention of one head, under a mask written out; ``leak`` times the mean of all values is added."""

    def __init__(self, width, mask, leak=0.0, hidden=None):
        super().__init__()
        self.mask, self.leak, self.hidden = mask, leak, hidden
        self.made = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.made(x).chunk(3, -1)
        allowed = self.mask.to_dense(x.shape[1], batch=len(x))[:, 0]
        if self.hidden is not None:
            allowed[:, self.hidden + 1 :, self.hidden] = False
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)
        return self.out(weights @ value + self.leak * value.mean((0, 1)))


class Experts(nn.Module):
    """A router that gives each of two experts at most half of all tokens, first come first served."""

    def __init__(self, width):
        super().__init__()
        self.router, self.one, self.two = nn.Linear(width, 2), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        rows = x.flatten(0, 1)
        first = self.router(rows).argmax(-1) == 0
        placed = first & (first.flip(0).cumsum(0).flip(0) <= len(rows) // 3)  # the last come first: it looks ahead
        return torch.where(placed[:, None], self.one(rows), self.two(rows) * ~first[:, None]).view_as(x)


class Normed(nn.BatchNorm1d):
    """BatchNorm over all tokens of the batch."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class Layer(nn.Module):
    def __init__(self, width, mixer, norm=None, feed=None):
        super().__init__()
        self.norm = norm or nn.LayerNorm(width)
        self.attention = mixer
        self.feed = feed or nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.feed(x)


class Small(nn.Module):
    """Six layers by default, each with its mask; ``changed`` puts other layers in some places."""

    def __init__(self, rules, changed=(), width=24, vocab=40):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        layers = {place: Layer(width, Mixer(width, rule)) for place, rule in enumerate(rules)} | dict(changed)
        self.layers = nn.ModuleList(layers[place] for place in sorted(layers))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def small(rule, changed=(), layers=6, seed=0):
    torch.manual_seed(seed)
    return Small([rule] * layers, changed() if callable(changed) else changed).eval()


class EvalPattern(Mixer):
    """Sees what its mask says in training, and something else afterwards."""

    def forward(self, x):
        kept = self.mask
        if not self.training:
            self.mask = masks.Window(None, 2)
        try:
            return super().forward(x)
        finally:
            self.mask = kept
