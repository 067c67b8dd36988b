"""Attention in the code of other libraries' modules, in several styles."""

import math

import torch
from torch import nn
from torch.nn import functional as F

D, H = 16, 4


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Base(nn.Module):
    """Projects to heads; the classes below differ in how they attend."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, context=None, allowed=None):
        other = x if context is None else context
        q, k, v = heads(self.q(x)), heads(self.k(other)), heads(self.v(other))
        return self.out(self.attend(q, k, v, allowed).transpose(1, 2).flatten(2))


class Written(Base):
    """nanoGPT, minGPT."""

    def attend(self, q, k, v, allowed):
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        if allowed is not None:
            att = att.masked_fill(allowed.logical_not(), float("-inf"))
        return self.drop(F.softmax(att, dim=-1)) @ v


class Einsum(Base):
    """x-transformers."""

    def attend(self, q, k, v, allowed):
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
        if allowed is not None:
            sim = sim.masked_fill(~allowed, -torch.finfo(sim.dtype).max)
        return torch.einsum("b h i j, b h j d -> b h i d", self.drop(sim.softmax(dim=-1)), v)


class Baddbmm(Base):
    """fairseq, diffusers."""

    def attend(self, q, k, v, allowed):
        shape = q.shape
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        bias = torch.zeros(len(q), q.shape[1], k.shape[1], dtype=q.dtype)
        if allowed is not None:
            bias = bias.masked_fill(~allowed, -10000.0)
        scores = torch.baddbmm(bias, q, k.mT, beta=1, alpha=q.shape[-1] ** -0.5)
        return torch.bmm(self.drop(scores.softmax(-1)), v).unflatten(0, shape[:2])


class Sdpa(Base):
    """litgpt, whisper, timm."""

    def attend(self, q, k, v, allowed):
        return F.scaled_dot_product_attention(q, k, v, allowed, self.drop.p if self.training else 0.0)


class OwnMultihead(nn.MultiheadAttention):
    """An attention of torch whose forward is overridden."""

    def __init__(self, dropout=0.0):
        super().__init__(D, H, dropout=dropout, batch_first=True)

    def forward(self, x, context=None, allowed=None):
        other = x if context is None else context
        hidden = None if allowed is None else ~allowed
        return super().forward(x, other, other, attn_mask=hidden, need_weights=False)[0]


STYLES = {"written": Written, "einsum": Einsum, "baddbmm": Baddbmm, "sdpa": Sdpa, "multihead": OwnMultihead}


class Block(nn.Module):
    def __init__(self, attention, dropout=0.0):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(D), attention(dropout), nn.Linear(D, D)

    def forward(self, x, allowed=None):
        return x + self.mlp(self.attn(self.norm(x), allowed=allowed))


class Model(nn.Module):
    def __init__(self, attention, layers=2, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention, dropout) for _ in range(layers))

    def forward(self, x, allowed=None):
        for block in self.blocks:
            x = block(x, allowed)
        return x


class Seq2Seq(nn.Module):
    """An encoder and a decoder with cross-attention."""

    def __init__(self, attention):
        super().__init__()
        self.encoder, self.decoder, self.cross = attention(), attention(), attention()

    def forward(self, x, y):
        memory = self.encoder(x)
        return self.cross(self.decoder(y), context=memory)


class StaticCache(nn.Module):
    """Self-attention with a cache of fixed length, whose free slots are masked."""

    def __init__(self, function, length):
        super().__init__()
        self.function, self.filled = function, 0
        self.register_buffer("keys", torch.zeros(2, H, length, D // H, dtype=torch.float64))
        self.register_buffer("values", torch.zeros(2, H, length, D // H, dtype=torch.float64))

    def forward(self, x, rule=None):
        first, last = self.filled, self.filled + x.shape[1]
        self.filled = last
        q = heads(x)
        self.keys[:, :, first:last], self.values[:, :, first:last] = q.sin(), q.cos()
        length = self.keys.shape[2]
        place = torch.arange(length)
        allowed = place <= torch.arange(first, last)[:, None]
        if rule is not None:
            allowed = allowed & rule.to_dense(length)[0, 0, first:last]
        return self.function(q, self.keys, self.values, allowed).transpose(1, 2).flatten(2)


FUNCTIONS = {
    "sdpa": F.scaled_dot_product_attention,
    "written": lambda q, k, v, allowed: ((q @ k.mT) / 2).masked_fill(~allowed, -1e9).softmax(-1) @ v,
}
