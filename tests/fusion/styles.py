"""Attention layers in the styles of well-known code bases, rewritten: ``[batch, n, 12]`` to the same shape."""

import math

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, N = 12, 3, 16


class Style(nn.Module):
    """Projections that most styles share."""

    calls = 1

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("causal", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def heads(self, x):
        return x.view(*x.shape[:-1], HEADS, -1).transpose(1, 2)


class NanoGPT(Style):
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.causal[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.drop(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.out(y)


class OldGPT2(Style):
    def forward(self, x):
        q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        w = torch.matmul(q, k.transpose(-1, -2))
        w = w / torch.full([], v.size(-1) ** 0.5, dtype=w.dtype, device=w.device)
        causal = self.causal[:, :, : q.size(-2), : k.size(-2)].bool()
        mask_value = torch.full([], torch.finfo(w.dtype).min, dtype=w.dtype, device=w.device)
        w = torch.where(causal, w.to(w.dtype), mask_value)
        w = nn.functional.softmax(w, dim=-1).type(v.dtype)
        return self.out(torch.matmul(self.drop(w), v).permute(0, 2, 1, 3).contiguous().view(x.shape))


class Bert(Style):
    def forward(self, x):
        padding = torch.ones(x.shape[:2], dtype=x.dtype)
        padding[0, -3:] = 0
        extended = (1.0 - padding[:, None, None, :]) * torch.finfo(x.dtype).min
        scores = torch.matmul(self.heads(self.q(x)), self.heads(self.k(x)).transpose(-1, -2))
        scores = scores / math.sqrt(WIDTH // HEADS)
        scores = scores + extended
        probs = self.drop(nn.Softmax(dim=-1)(scores))
        context = torch.matmul(probs, self.heads(self.v(x))).permute(0, 2, 1, 3).contiguous()
        return self.out(context.view(*context.size()[:-2], WIDTH))


class XTransformers(Style):
    def forward(self, x):
        q, k, v = (self.heads(part) for part in (self.q(x), self.k(x), self.v(x)))
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * WIDTH**-0.5
        dtype, i, j = dots.dtype, *dots.shape[-2:]
        mask_value = -torch.finfo(dots.dtype).max
        causal = torch.ones((i, j), device=x.device, dtype=torch.bool).triu(j - i + 1)
        dots = dots.masked_fill(causal, mask_value)
        attn = F.softmax(dots, dim=-1, dtype=torch.float32).type(dtype)
        out = torch.einsum("b h i j, b h j d -> b h i d", self.drop(attn), v)
        return self.out(out.transpose(1, 2).flatten(2))


class Esm(Style):
    """fairseq's layer: [length, batch, width], heads joined with the batch."""

    def forward(self, x):
        x = x.transpose(0, 1)
        tgt_len, bsz, embed_dim = x.size()
        head_dim = embed_dim // HEADS
        q = self.q(x) * head_dim**-0.5
        q = q.contiguous().view(tgt_len, bsz * HEADS, head_dim).transpose(0, 1)
        k = self.k(x).contiguous().view(-1, bsz * HEADS, head_dim).transpose(0, 1)
        v = self.v(x).contiguous().view(-1, bsz * HEADS, head_dim).transpose(0, 1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        assert list(attn_weights.size()) == [bsz * HEADS, tgt_len, tgt_len]
        padding = torch.zeros(bsz, tgt_len)
        padding[0, -2:] = 1
        attn_weights = attn_weights.view(bsz, HEADS, tgt_len, tgt_len)
        attn_weights = attn_weights.masked_fill(padding.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf"))
        attn_weights = attn_weights.view(bsz * HEADS, tgt_len, tgt_len)
        attn_weights_float = F.softmax(attn_weights, dim=-1, dtype=torch.float32)
        attn_weights = attn_weights_float.type_as(attn_weights)
        attn_probs = F.dropout(attn_weights_float.type_as(attn_weights), p=0.0, training=self.training)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out(attn).transpose(0, 1)


class Whisper(Style):
    def forward(self, x):
        _, n_ctx, n_state = x.shape
        scale = (n_state // HEADS) ** -0.25
        q = self.q(x).view(*x.shape[:2], HEADS, -1).permute(0, 2, 1, 3) * scale
        k = self.k(x).view(*x.shape[:2], HEADS, -1).permute(0, 2, 3, 1) * scale
        v = self.v(x).view(*x.shape[:2], HEADS, -1).permute(0, 2, 1, 3)
        mask = torch.empty(n_ctx, n_ctx, dtype=x.dtype).fill_(-math.inf).triu_(1)
        qk = q @ k
        qk = qk + mask[:n_ctx, :n_ctx]
        qk = qk.float()
        w = F.softmax(qk, dim=-1).to(q.dtype)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class Sam(Style):
    def __init__(self):
        super().__init__()
        self.rel_h, self.rel_w = (nn.Parameter(torch.randn(4, 4, WIDTH // HEADS)) for _ in range(2))

    def forward(self, x):
        B, (H, W) = x.shape[0], (4, 4)
        qkv = self.qkv(x).reshape(B, H * W, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * HEADS, H * W, -1).unbind(0)
        attn = (q * (WIDTH // HEADS) ** -0.5) @ k.transpose(-2, -1)
        r_q = q.reshape(B * HEADS, H, W, -1)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, self.rel_h)
        rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, self.rel_w)
        attn = (attn.view(B * HEADS, H, W, H, W) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]).view(
            B * HEADS, H * W, H * W
        )
        attn = attn.softmax(dim=-1)
        out = (attn @ v).view(B, HEADS, H, W, -1).permute(0, 2, 3, 1, 4).reshape(B, H * W, -1)
        return self.out(out)


class Diffusers(Style):
    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = (
            part.reshape(batch, length, HEADS, -1).permute(0, 2, 1, 3).reshape(batch * HEADS, length, -1)
            for part in (self.q(x), self.k(x), self.v(x))
        )
        attention_scores = torch.baddbmm(
            torch.empty(query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype, device=query.device),
            query,
            key.transpose(-1, -2),
            beta=0,
            alpha=(WIDTH // HEADS) ** -0.5,
        )
        attention_probs = attention_scores.softmax(dim=-1)
        del attention_scores
        attention_probs = attention_probs.to(query.dtype)
        hidden = torch.bmm(attention_probs, value)
        return self.out(hidden.reshape(batch, HEADS, length, -1).permute(0, 2, 1, 3).reshape(x.shape))


class T5(Style):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, HEADS)

    def forward(self, x):
        n = x.shape[1]
        distance = (torch.arange(n)[None] - torch.arange(n)[:, None]).clamp(-4, 3) + 4
        position_bias = self.table(distance).permute(2, 0, 1).unsqueeze(0)
        padding = torch.zeros(x.shape[0], 1, 1, n, dtype=x.dtype)
        padding[-1, ..., -4:] = torch.finfo(x.dtype).min
        position_bias = position_bias + padding
        q, k, v = (self.heads(part) for part in (self.q(x), self.k(x), self.v(x)))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += position_bias
        attn_weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        attn_weights = nn.functional.dropout(attn_weights, p=0.1, training=False)
        out = torch.matmul(attn_weights, v).transpose(1, 2).contiguous().view(x.shape[0], -1, WIDTH)
        return self.out(out)


class Swin(Style):
    windows = 2

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(HEADS, N // 2, N // 2))

    def forward(self, x):
        windows = x.reshape(-1, N // self.windows, WIDTH)
        B_, n, C = windows.shape
        qkv = self.qkv(windows).reshape(B_, n, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q * (C // HEADS) ** -0.5
        attn = q @ k.transpose(-2, -1)
        attn = attn + self.table.unsqueeze(0)
        mask = torch.zeros(self.windows, n, n, dtype=x.dtype)
        mask[1, : n // 2, n // 2 :] = -100.0
        attn = attn.view(B_ // self.windows, self.windows, HEADS, n, n) + mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, HEADS, n, n)
        attn = self.drop(attn.softmax(dim=-1))
        return self.out((attn @ v).transpose(1, 2).reshape(B_, n, C)).view(x.shape)


class SwinV2(Swin):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((HEADS, 1, 1))))

    def forward(self, x):
        q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        logit_scale = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        attn = attn * logit_scale
        attn = attn.softmax(dim=-1)
        return self.out((attn @ v).transpose(1, 2).reshape(x.shape))


class Llama(Style):
    """Grouped heads, as transformers' eager attention and Meta's code repeat them."""

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x))[:, :1], self.heads(self.v(x))[:, :1]
        k, v = (part[:, :, None].expand(-1, 1, HEADS, N, -1).reshape(-1, HEADS, N, WIDTH // HEADS) for part in (k, v))
        mask = torch.full((1, 1, N, N), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        attn_weights = torch.matmul(q, k.transpose(2, 3)) * (WIDTH // HEADS) ** -0.5
        attn_weights = attn_weights + mask[:, :, :, : k.shape[-2]]
        attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)
        attn_weights = nn.functional.dropout(attn_weights, p=0.0, training=self.training)
        return self.out(torch.matmul(attn_weights, v).transpose(1, 2).contiguous().reshape(x.shape))


class Gemma2(Style):
    def forward(self, x):
        q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))
        attn = torch.matmul(q, k.transpose(2, 3)) * 0.3
        attn = attn / 50.0
        attn = torch.tanh(attn)
        attn = attn * 50.0
        attn = attn.masked_fill(self.causal[..., :N, :N] == 0, torch.finfo(x.dtype).min)
        attn = F.softmax(attn, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.out(torch.matmul(attn, v).transpose(1, 2).reshape(x.shape))


class StarCoder(Style):
    """One head of keys; the heads of queries are rows of one product."""

    def forward(self, x):
        B, n, _ = x.shape
        head_dim = WIDTH // HEADS
        query, key, value = self.q(x), self.k(x)[..., :head_dim], self.v(x)[..., :head_dim]
        attn_weights = torch.empty((B, n * HEADS, n), dtype=x.dtype)
        scores = torch.baddbmm(
            attn_weights, query.reshape(B, n * HEADS, head_dim), key.transpose(1, 2), beta=0, alpha=head_dim**-0.5
        ).view(B, n, HEADS, n)
        mask = self.causal[0, :, :n, :n].bool().view(1, n, 1, n)
        scores = torch.where(mask, scores, torch.full([], torch.finfo(x.dtype).min, dtype=x.dtype))
        weights = F.softmax(scores, dim=-1)
        return self.out(torch.bmm(weights.view(B, n * HEADS, n), value).view(x.shape))


class Bloom(Style):
    def forward(self, x):
        B, n, _ = x.shape
        q, k, v = (self.heads(part).reshape(B * HEADS, n, -1) for part in self.qkv(x).chunk(3, -1))
        slopes = torch.tensor([0.5, 0.25, 0.125])
        alibi = (slopes[None, :, None, None] * torch.arange(n)[None, None, None]).expand(B, -1, -1, -1)
        alibi = alibi.reshape(B * HEADS, 1, n).to(x.dtype)
        scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.5).view(B, HEADS, n, n)
        scores = scores.to(torch.float32)
        weights = torch.masked_fill(scores, self.causal[..., :n, :n] == 0, torch.finfo(scores.dtype).min)
        probs = F.softmax(weights, dim=-1, dtype=torch.float32).to(x.dtype)
        context = torch.bmm(probs.view(B * HEADS, n, n), v)
        return self.out(context.view(B, HEADS, n, -1).transpose(1, 2).reshape(x.shape))


class Timm(Style):
    def forward(self, x):
        B, n, C = x.shape
        q, k, v = self.qkv(x).reshape(B, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q = q * (C // HEADS) ** -0.5
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.drop(attn)
        return self.out((attn @ v).transpose(1, 2).reshape(B, n, C))


class NonLocal(Style):
    """Convolutional code: channels first, keys first, the softmax over the last axis of queries by keys."""

    def forward(self, x):
        theta, phi, g = (part.transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        f = torch.einsum("bci,bcj->bij", theta, phi)
        f = torch.softmax(f * WIDTH**-0.5, dim=2)
        return self.out(torch.einsum("bij,bcj->bci", f, g).transpose(1, 2))


class ChannelsFirst(Style):
    """Guided-diffusion: heads by the batch, channels before length, both operands scaled."""

    def forward(self, x):
        q, k, v = (self.heads(part).transpose(2, 3).reshape(-1, WIDTH // HEADS, N) for part in self.qkv(x).chunk(3, -1))
        scale = 1 / math.sqrt(math.sqrt(WIDTH // HEADS))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        a = torch.einsum("bts,bcs->bct", weight, v)
        return self.out(a.reshape(x.shape[0], WIDTH, N).transpose(1, 2))
