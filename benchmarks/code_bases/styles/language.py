"""Language models in the spelling of nanoGPT, minGPT, the annotated transformer, T5, BLOOM, Llama and others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.code_bases.case import Make, case

DIM, HEADS, LENGTH, VOCABULARY = 32, 4, 12, 50


def _ids(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(3))


class Stack(nn.Module):
    """An embedding, two pre-norm blocks with an attention module, and a language-model head."""

    def __init__(self, attention: Any):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.attentions = nn.ModuleList(attention() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        return self.head(x)


def _stack(attention: Any) -> Make:
    return lambda: (Stack(attention), lambda model: model(_ids()))


def style(code_base: str, name: str) -> Any:
    """Add a two-layer model with an attention module to the cases."""

    def add(attention: Any) -> Any:
        case(code_base, name, 2, is_rewritten=True)(_stack(attention))
        return attention

    return add


@style("minGPT", "CausalSelfAttention")
class MinGPT(nn.Module):
    """The attention of minGPT: masked_fill with -inf by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.attn_drop, self.resid_drop, self.proj = nn.Dropout(0.1), nn.Dropout(0.1), nn.Linear(DIM, DIM)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        k = self.key(x).view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = self.query(x).view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = self.value(x).view(B, T, HEADS, C // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_drop(att)
        y = att @ v
        return self.resid_drop(self.proj(y.transpose(1, 2).contiguous().view(B, T, C)))


@style("nanoGPT", "CausalSelfAttention with SDPA")
class NanoGPT(nn.Module):
    """The attention of nanoGPT with torch's SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(DIM, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


@style("Let's build GPT", "Head")
class SingleHeads(nn.Module):
    """Heads as separate modules, concatenated, as in the lecture "Let's build GPT"."""

    class Head(nn.Module):
        """One head."""

        def __init__(self) -> None:
            super().__init__()
            self.key, self.query, self.value = (nn.Linear(DIM, DIM // HEADS, bias=False) for _ in range(3))
            self.register_buffer("tril", torch.tril(torch.ones(64, 64)))

        def forward(self, x: Tensor) -> Tensor:
            _, T, _ = x.shape
            k, q = self.key(x), self.query(x)
            wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
            wei = F.softmax(wei, dim=-1)
            return wei @ self.value(x)

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(self.Head() for _ in range(1))
        self.proj = nn.Linear(DIM // HEADS, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


@style("annotated transformer", "MultiHeadedAttention")
class Annotated(nn.Module):
    """A function of query, key, value and mask, called by a module with four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linears, self.dropout = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4)), nn.Dropout(0.1)
        self.attn: Tensor | None = None

    @staticmethod
    def attention(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Any
    ) -> tuple[Tensor, Tensor]:
        d_k = query.size(-1)
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        p_attn = scores.softmax(dim=-1)
        if dropout is not None:
            p_attn = dropout(p_attn)
        return torch.matmul(p_attn, value), p_attn

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(1, 1, x.size(1), x.size(1), dtype=torch.uint8))
        query, key, value = (
            lin(x).view(x.size(0), -1, HEADS, DIM // HEADS).transpose(1, 2) for lin in self.linears[:3]
        )
        x, self.attn = self.attention(query, key, value, mask, self.dropout)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(x.size(0), -1, DIM))


@style("GPT-2 of OpenAI", "attn")
class OpenAI(nn.Module):
    """The mask of OpenAI's GPT-2: ``w * b - 1e10 * (1 - b)``, and Conv1D projections."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(DIM, 3 * DIM) * 0.1), nn.Parameter(torch.zeros(3 * DIM))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addmm(self.bias, x.reshape(-1, DIM), self.weight).view(*x.shape[:-1], -1)
        query, key, value = x.split(DIM, dim=2)
        query, value = (y.view(*y.shape[:-1], HEADS, -1).permute(0, 2, 1, 3) for y in (query, value))
        key = key.view(*key.shape[:-1], HEADS, -1).permute(0, 2, 3, 1)
        w = torch.matmul(query, key) / math.sqrt(value.size(-1))
        nd, ns = w.size(-2), w.size(-1)
        b = torch.tril(torch.ones(ns, ns)).view(1, 1, ns, ns)[:, :, ns - nd : ns, :ns]
        w = w * b - 1e10 * (1 - b)
        a = torch.matmul(nn.Softmax(dim=-1)(w), value).permute(0, 2, 1, 3).contiguous()
        return self.out(a.view(*a.shape[:-2], DIM))


@style("Mesh-TensorFlow T5", "relative position bias")
class T5(nn.Module):
    """Unscaled scores with a bias by bucket of the distance, softmax in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(8, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (layer(x).view(B, -1, HEADS, DIM // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2))
        distance = (torch.arange(T)[None] - torch.arange(T)[:, None]).clamp(-4, 3) + 4
        scores += self.relative_attention_bias(distance).permute([2, 0, 1]).unsqueeze(0)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        weights = F.dropout(weights, p=0.1, training=self.training)
        return self.o(torch.matmul(weights, v).transpose(1, 2).contiguous().view(B, -1, DIM))


@style("BLOOM of BigScience", "baddbmm with ALiBi")
class Bloom(nn.Module):
    """Scores from baddbmm on an ALiBi bias, fused query, key and value of each head, masks by the lowest number."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        width = DIM // HEADS
        fused = self.query_key_value(x).view(B, T, HEADS, 3, width)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q = q.transpose(1, 2).reshape(B * HEADS, T, width)
        k = k.permute(0, 2, 3, 1).reshape(B * HEADS, width, T)
        v = v.transpose(1, 2).reshape(B * HEADS, T, width)
        slopes = torch.tensor([2.0 ** -(2 * i + 2) for i in range(HEADS)])
        alibi = (slopes[:, None] * torch.arange(T)[None]).repeat(B, 1)[:, None]
        scores = alibi.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=1.0 / math.sqrt(width))
        scores = scores.view(B, HEADS, T, T)
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
        scores = torch.masked_fill(scores, mask, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype).view(B * HEADS, T, T)
        y = torch.bmm(probs, v).view(B, HEADS, T, width).permute(0, 2, 1, 3)
        return self.dense(y.reshape(B, T, DIM))


@style("Llama of Meta", "Attention with a cache and GQA")
class Llama(nn.Module):
    """Rotary embeddings in complex numbers, repeated key heads, a preallocated cache, an additive mask."""

    def __init__(self) -> None:
        super().__init__()
        width = DIM // HEADS
        self.wq, self.wo = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.wk, self.wv = nn.Linear(DIM, 2 * width, bias=False), nn.Linear(DIM, 2 * width, bias=False)
        self.cache_k, self.cache_v = torch.zeros(4, 32, 2, width), torch.zeros(4, 32, 2, width)

    @staticmethod
    def rotary(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        angles = torch.outer(torch.arange(x.shape[1]).float(), 10000.0 ** -torch.linspace(0, 1, x.shape[-1] // 2))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.rotary(self.wq(x).view(bsz, seqlen, HEADS, -1))
        xk, xv = self.rotary(self.wk(x).view(bsz, seqlen, 2, -1)), self.wv(x).view(bsz, seqlen, 2, -1)
        if not torch.is_grad_enabled():
            self.cache_k[:bsz, :seqlen], self.cache_v[:bsz, :seqlen] = xk, xv
            xk, xv = self.cache_k[:bsz, :seqlen], self.cache_v[:bsz, :seqlen]
        keys, values = (
            y[:, :, :, None, :].expand(bsz, seqlen, 2, HEADS // 2, -1).reshape(bsz, seqlen, HEADS, -1) for y in (xk, xv)
        )
        xq, keys, values = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(DIM // HEADS)
        mask = torch.triu(torch.full((seqlen, seqlen), float("-inf")), diagonal=1)
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values).transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)


@style("multi-query attention of Shazeer", "einsum")
class MultiQuery(nn.Module):
    """Letters of "Fast Transformer Decoding": one key head, einsum projections, ``repeat_interleave`` is not needed."""

    def __init__(self) -> None:
        super().__init__()
        width = DIM // HEADS
        self.P_q, self.P_o = (nn.Parameter(torch.randn(HEADS, DIM, width) * 0.1) for _ in range(2))
        self.P_k, self.P_v = (nn.Parameter(torch.randn(DIM, width) * 0.1) for _ in range(2))

    def forward(self, X: Tensor) -> Tensor:
        Q = torch.einsum("bnd,hdk->bhnk", X, self.P_q)
        K, V = torch.einsum("bmd,dk->bmk", X, self.P_k), torch.einsum("bmd,dv->bmv", X, self.P_v)
        logits = torch.einsum("bhnk,bmk->bhnm", Q, K)
        mask = torch.triu(torch.full(logits.shape[-2:], -1e9), 1)
        weights = torch.softmax(logits + mask, -1)
        Y = torch.einsum("bhnm,bmv->bhnv", weights, V)
        return torch.einsum("bhnv,hdv->bnd", Y, self.P_o)


@style("talking heads of Shazeer", "heads mixed before and after the softmax")
class TalkingHeads(nn.Module):
    """Scores of heads are mixed before the softmax; the mixing after it is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.1 * torch.randn(HEADS, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * (DIM // HEADS) ** -0.5
        dots = torch.einsum("bhij,hg->bgij", dots, self.mix)
        out = torch.einsum("bhij,bhjd->bhid", dots.softmax(dim=-1), v)
        return self.out(out.transpose(1, 2).flatten(2))


@style("Gemma 2 of Google", "softcap and a window")
class Gemma2(nn.Module):
    """A softcap by tanh, a sliding window by where, an additive causal mask."""

    def __init__(self) -> None:
        super().__init__()
        width = DIM // HEADS
        self.qkv_proj, self.o_proj = nn.Linear(DIM, (HEADS + 4) * width), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        width = DIM // HEADS
        xq, xk, xv = self.qkv_proj(x).split([DIM, 2 * width, 2 * width], dim=-1)
        xq, xk, xv = xq.view(B, -1, HEADS, width), xk.view(B, -1, 2, width), xv.view(B, -1, 2, width)
        key, value = (torch.repeat_interleave(y, HEADS // 2, dim=2) for y in (xk, xv))
        q, k, v = xq.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        q = q * width**-0.5
        scores = torch.matmul(q, k.transpose(2, 3))
        mask = torch.triu(torch.full((1, 1, T, T), -2.3819763e38), diagonal=1)
        ones = torch.ones_like(mask)
        window = torch.triu(ones, -1 * 4 + 1) * torch.tril(ones, 4 - 1)
        mask = torch.where(window == 1, mask, -2.3819763e38)
        scores = torch.tanh(scores / 50.0) * 50.0 + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.o_proj(torch.matmul(scores, v).transpose(1, 2).contiguous().view(B, T, -1))


@style("memory-efficient attention of Rabe and Staats", "queries in chunks")
class Chunked(nn.Module):
    """Queries in chunks, each with its own softmax, joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        chunks = []
        for chunk in q.split(LENGTH, dim=2):
            sim = torch.einsum("b h i d, b h j d -> b h i j", chunk * k.shape[-1] ** -0.5, k)
            attn = sim.softmax(dim=-1)
            chunks.append(torch.einsum("b h i j, b h j d -> b h i d", attn, v))
        return self.out(torch.cat(chunks, dim=2).transpose(1, 2).flatten(2))
