"""More attention layers in the styles of research code, rewritten, and the list of all styles."""

import math

import torch
from tests.fusion.styles import HEADS, WIDTH, N, Style, SwinV2
from torch import nn
from torch.nn import functional as F


class OldStableDiffusion(Style):
    """CompVis: a transposed weight multiplies channels-first values from the right."""

    def forward(self, x):
        q, k, v = (part.transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        w_ = torch.bmm(q.permute(0, 2, 1), k)
        w_ = w_ * (int(WIDTH) ** (-0.5))
        w_ = torch.nn.functional.softmax(w_, dim=2)
        w_ = w_.permute(0, 2, 1)
        return self.out(torch.bmm(v, w_).transpose(1, 2))


class Perceiver(Style):
    """Learned queries attend to the input, and the input attends to them."""

    calls = 2

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH))

    def attend(self, x, context):
        sim = torch.einsum("bid,bjd->bij", self.q(x), self.k(context)) * WIDTH**-0.5
        return torch.einsum("bij,bjd->bid", sim.softmax(dim=-1), self.v(context))

    def forward(self, x):
        latents = self.attend(self.latents.expand(len(x), -1, -1), x)
        return self.out(self.attend(x, latents))


class AnnotatedTransformer(Style):
    def forward(self, x):
        query, key, value = (
            part.view(x.size(0), -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in (self.q(x), self.k(x), self.v(x))
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        scores = scores.masked_fill(self.causal[..., :N, :N] == 0, -1e9)
        p_attn = scores.softmax(dim=-1)
        p_attn = self.drop(p_attn)
        out, _ = torch.matmul(p_attn, value), p_attn
        return self.out(out.transpose(1, 2).contiguous().view(x.size(0), -1, WIDTH))


class FirstGPT(Style):
    """A mask that multiplies the scores by 0 before a large number is subtracted."""

    def forward(self, x):
        q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        w = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(v.size(-1))
        b = self.causal[:, :, : w.size(-2), : w.size(-1)]
        w = w * b - 1e10 * (1 - b)
        return self.out(torch.matmul(nn.Softmax(dim=-1)(w), v).transpose(1, 2).reshape(x.shape))


class SamOnFiveAxes(Style):
    """Biases of rows and columns that depend on the query, added through a view of five axes."""

    def __init__(self):
        super().__init__()
        self.rel_h, self.rel_w = (nn.Parameter(torch.randn(4, 4, WIDTH // HEADS)) for _ in range(2))

    def forward(self, x):
        B, n, _ = x.shape
        q, k, v = (self.heads(part).reshape(B * HEADS, n, -1) for part in self.qkv(x).chunk(3, dim=-1))
        attn = q @ k.transpose(-2, -1)
        grid = q.reshape(B * HEADS, 4, 4, -1)
        rows = torch.einsum("bhwc,hkc->bhwk", grid, self.rel_h)
        columns = torch.einsum("bhwc,wkc->bhwk", grid, self.rel_w)
        attn = attn.view(-1, 4, 4, 4, 4) + rows[:, :, :, :, None] + columns[:, :, :, None, :]
        out = attn.view(-1, n, n).softmax(dim=-1) @ v
        return self.out(out.view(B, HEADS, n, -1).transpose(1, 2).reshape(x.shape))


class TransformerXL(Style):
    """Scores of contents and of shifted positions, a scale in place, a softmax over the second axis."""

    def forward(self, x):
        x = x.transpose(0, 1)
        n, B, _ = x.shape
        q, k, v = (part.reshape(n, B, HEADS, -1) for part in self.qkv(x).chunk(3, dim=-1))
        r = self.k(torch.linspace(-1, 1, n * WIDTH).view(n, WIDTH).to(x)).view(n, HEADS, -1)
        contents = torch.einsum("ibnd,jbnd->ijbn", (q, k))
        places = torch.einsum("ibnd,jnd->ijbn", (q, r))
        padded = torch.cat([x.new_zeros((n, 1, B, HEADS)), places], dim=1)
        score = contents + padded.view(n + 1, n, B, HEADS)[1:].view_as(contents)
        score.mul_((WIDTH // HEADS) ** -0.5)
        hidden = torch.triu(torch.ones(n, n), diagonal=1).bool()[:, :, None, None]
        weights = F.softmax(score.float().masked_fill(hidden, -math.inf).type_as(score), dim=1)
        out = torch.einsum("ijbn,jbnd->ibnd", (weights, v))
        return self.out(out.contiguous().view(n, B, WIDTH)).transpose(0, 1)


STYLES = {kind.__name__: kind for kind in Style.__subclasses__()} | {"SwinV2": SwinV2}
