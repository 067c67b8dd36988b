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


class LengthsInPlace(Style):
    """Chinese textbooks: scores viewed as a matrix, in which keys beyond each length are overwritten."""

    def __init__(self):
        super().__init__()
        self.register_buffer("lengths", torch.tensor([5, 11]))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (
            part.reshape(b, n, HEADS, -1).permute(0, 2, 1, 3).reshape(b * HEADS, n, -1)
            for part in (self.q(x), self.k(x), self.v(x))
        )
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        limits = self.lengths.repeat_interleave(HEADS).repeat_interleave(n)
        rows = scores.reshape(-1, n)
        rows[torch.arange(n)[None] >= limits[:, None]] = -1e6
        self.attention_weights = F.softmax(rows.reshape(scores.shape), dim=-1)
        out = torch.bmm(self.drop(self.attention_weights), v)
        return self.out(out.reshape(b, HEADS, n, -1).permute(0, 2, 1, 3).reshape(b, n, -1))


class AbsorbedLatents(Style):
    """DeepSeek: scores of latents and of positions, keys that all heads share, and heads after the queries."""

    def __init__(self):
        super().__init__()
        self.up, self.position = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, 5)), nn.Linear(WIDTH, HEADS * 2)
        self.down, self.key_position = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 2)

    def forward(self, x):
        b, n, _ = x.shape
        q = torch.einsum("bshd,hdc->bshc", self.q(x).view(b, n, HEADS, -1), self.up)
        latents = self.down(x)
        scores = torch.einsum("bshc,btc->bsht", q, latents)
        scores = (
            scores + torch.einsum("bshr,btr->bsht", self.position(x).view(b, n, HEADS, 2), self.key_position(x))
        ) / 3
        scores += torch.full((n, n), -math.inf).triu_(1).unsqueeze(1)
        out = torch.einsum("bsht,btc->bshc", scores.softmax(dim=-1, dtype=torch.float32).type_as(x), latents)
        return self.out(torch.einsum("bshc,hdc->bshd", out, self.up).flatten(2))


class HeadsLast(Style):
    """Shared keys broadcast over the queries' axis: only the mask tells which axis holds the queries."""

    def forward(self, x):
        b, n, _ = x.shape
        q = self.q(x).view(b, n, HEADS, -1)
        k, v = (part(x)[..., : WIDTH // HEADS].unsqueeze(1) for part in (self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden[:, None], torch.finfo(scores.dtype).min).softmax(dim=-1)
        return self.out(torch.matmul(weights.to(v.dtype), v).flatten(2))


class ChunkedConformer(Style):
    """Speech: positions on one side, chunks as a mask, and a second fill because a row may have no key."""

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (self.heads(part) for part in (self.q(x), self.k(x), self.v(x)))
        chunk = torch.arange(n) // 4
        hidden = (chunk[:, None] < chunk) | (torch.arange(n) == 2)[:, None]
        attn = torch.matmul(q, k.permute(0, 1, 3, 2)) * q.shape[-1] ** -0.5
        attn = F.softmax(attn.masked_fill(hidden, -math.inf), dim=-1, dtype=torch.float32)
        attn = self.drop(attn).masked_fill(hidden, 0.0).type_as(v)
        return self.out(torch.matmul(attn, v).transpose(1, 2).reshape(x.shape))


class NumberedScores(Style):
    """Mask added after NaN and infinity are replaced, a softmax in float32, batch and heads in one axis."""

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (self.heads(part).reshape(b * HEADS, n, -1) for part in (self.q(x), self.k(x), self.v(x)))
        attn = torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2))
        attn = torch.nan_to_num(attn)
        attn += torch.triu(torch.full((n, n), -math.inf), 1).unsqueeze(0)
        attn = F.softmax(attn, dim=-1, dtype=torch.float32).type_as(attn)
        out = torch.bmm(attn, v).reshape(b, HEADS, n, -1).transpose(1, 2)
        return self.out(out.reshape(b, n, -1))


STYLES = {kind.__name__: kind for kind in Style.__subclasses__()} | {"SwinV2": SwinV2}
