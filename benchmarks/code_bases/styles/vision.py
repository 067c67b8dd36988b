"""Attention for images in the spelling of ViT, Swin, DETR, SAM, Perceiver and others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.code_bases.case import case

DIM, HEADS, SIDE = 32, 4, 4


def tokens(count: int = SIDE * SIDE, batch: int = 2) -> Tensor:
    """Return the same random tokens each time, ``[batch, count, DIM]``."""
    return torch.randn(batch, count, DIM, generator=torch.Generator().manual_seed(3))


class Layers(nn.Module):
    """Two layers of an attention module with residual connections."""

    def __init__(self, attention: Any):
        super().__init__()
        self.layers = nn.ModuleList(attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def style(code_base: str, name: str, **options: Any) -> Any:
    """Add a two-layer model with an attention module to the cases."""

    def add(attention: Any) -> Any:
        case(code_base, name, 2, is_rewritten=True, **options)(
            lambda: (Layers(attention), lambda model: model(tokens()))
        )
        return attention

    return add


@style("ViT of timm before SDPA", "Attention")
class TimmViT(nn.Module):
    """The attention of timm's first vision transformers: ``qkv`` is reshaped, permuted and indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = (DIM // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


@style("ViT from scratch", "einops and einsum")
class EinopsViT(nn.Module):
    """The spelling of many tutorials: einops, ``einsum("bhqd, bhkd -> bhqk")``, softmax divided by a root."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.projection, self.att_drop = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange  # noqa: PLC0415

        qkv = rearrange(self.qkv(x), "b n (h d qkv) -> (qkv) b h n d", h=HEADS, qkv=3)
        queries, keys, values = qkv[0], qkv[1], qkv[2]
        energy = torch.einsum("bhqd, bhkd -> bhqk", queries, keys)
        att = F.softmax(energy / DIM**0.5, dim=-1)
        att = self.att_drop(att)
        out = torch.einsum("bhal, bhlv -> bhav ", att, values)
        return self.projection(rearrange(out, "b h n d -> b n (h d)"))


@style("Swin of Microsoft", "WindowAttention with shifted windows")
class Swin(nn.Module):
    """Windows in the batch, a relative position bias from a table, the mask of shifted windows by views."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.softmax = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Softmax(dim=-1)
        self.relative_position_bias_table = nn.Parameter(torch.randn(9, HEADS) * 0.1)
        coords = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        distance = (coords[:, :, None] - coords[:, None]).permute(1, 2, 0) + 1
        self.register_buffer("relative_position_index", distance[..., 0] * 3 + distance[..., 1])
        regions = torch.arange(4)[:, None].expand(4, 4) % 3
        regions = torch.stack([regions[i].roll(i) for i in range(4)])
        self.register_buffer("attn_mask", (regions[:, None] != regions[:, :, None]).float() * -100.0 * 2)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q * (C // HEADS) ** -0.5
        attn = q @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        nW = mask.shape[0]
        attn = attn.view(B_ // nW, nW, HEADS, N, N) + mask.unsqueeze(1).unsqueeze(0)
        attn = self.softmax(attn.view(-1, HEADS, N, N))
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))

    def forward(self, x: Tensor) -> Tensor:
        B, _, C = x.shape
        windows = x.view(B, 2, 2, 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, C)
        windows = self.attend(windows, self.attn_mask)
        return windows.view(B, 2, 2, 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(B, 16, C)


@style("Swin v2 of Microsoft", "cosine attention with a learned scale")
class SwinV2(nn.Module):
    """Normalised queries and keys, and an exponential of a clamped scale for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((HEADS, 1, 1))))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 16), nn.ReLU(inplace=True), nn.Linear(16, HEADS, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        logit_scale = torch.clamp(self.logit_scale, max=torch.log(torch.tensor(1.0 / 0.01))).exp()
        attn = attn * logit_scale
        place = torch.stack([torch.arange(N) // SIDE, torch.arange(N) % SIDE], -1).float()
        bias = 16 * torch.sigmoid(self.cpb_mlp(place[:, None] - place[None]).permute(2, 0, 1))
        attn = (attn + bias.unsqueeze(0)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))


@style("DETR of Facebook", "bmm with a padding mask")
class DETR(nn.Module):
    """torch's old multi-head attention: batch and heads joined, length first, bmm, a padding mask through views."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        tgt_len, bsz, _ = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q = q * (DIM // HEADS) ** -0.5
        q, k, v = (y.contiguous().view(-1, bsz * HEADS, DIM // HEADS).transpose(0, 1) for y in (q, k, v))
        weights = torch.bmm(q, k.transpose(1, 2))
        padding = torch.arange(tgt_len)[None] >= torch.tensor([[tgt_len], [tgt_len - 3]])
        weights = weights.view(bsz, HEADS, tgt_len, tgt_len)
        weights = weights.masked_fill(padding.unsqueeze(1).unsqueeze(2), float("-inf"))
        weights = F.softmax(weights.view(bsz * HEADS, tgt_len, tgt_len), dim=-1)
        weights = F.dropout(weights, p=0.1, training=self.training)
        out = torch.bmm(weights, v).transpose(0, 1).contiguous().view(tgt_len, bsz, DIM)
        return self.out_proj(out).transpose(0, 1)


@style("SAM of Facebook", "decomposed relative positions")
class SAM(nn.Module):
    """Relative positions of rows and columns, computed from the query by einsum and added through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.scale = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), (DIM // HEADS) ** -0.5
        self.rel_pos_h = nn.Parameter(torch.randn(2 * SIDE - 1, DIM // HEADS) * 0.1)
        self.rel_pos_w = nn.Parameter(torch.randn(2 * SIDE - 1, DIM // HEADS) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        H = W = SIDE
        qkv = self.qkv(x).reshape(B, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * HEADS, N, -1).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        place = torch.arange(SIDE)[:, None] - torch.arange(SIDE)[None] + SIDE - 1
        Rh, Rw = self.rel_pos_h[place], self.rel_pos_w[place]
        r_q = q.reshape(B * HEADS, H, W, -1)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, Rh)
        rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, Rw)
        attn = (attn.view(-1, H, W, H, W) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]).view(-1, N, N)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).view(B, HEADS, H, W, -1).permute(0, 2, 3, 1, 4).reshape(B, N, -1)
        return self.proj(x)


@style("Stable Diffusion of CompVis", "SpatialTransformer's CrossAttention")
class CompVis(nn.Module):
    """Heads joined with the batch by einops, einsum, in two modules: itself and a text."""

    class CrossAttention(nn.Module):
        """One attention."""

        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
            self.to_out = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            from einops import rearrange  # noqa: PLC0415

            q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
            q, k, v = (rearrange(t, "b n (h d) -> (b h) n d", h=HEADS) for t in (q, k, v))
            sim = torch.einsum("b i d, b j d -> b i j", q, k) * (DIM // HEADS) ** -0.5
            attn = sim.softmax(dim=-1)
            out = torch.einsum("b i j, b j d -> b i d", attn, v)
            return self.to_out(rearrange(out, "(b h) n d -> b n (h d)", h=HEADS))

    def __init__(self) -> None:
        super().__init__()
        self.attn1 = self.CrossAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn1(x, x)


@style("VQGAN of CompVis", "AttnBlock with convolutions")
class AttnBlock(nn.Module):
    """Convolutions as projections, ``[b, c, h * w]`` values, the weights transposed before the product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, DIM)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(DIM, DIM, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h_ = self.norm(x.transpose(1, 2).contiguous().view(-1, DIM, SIDE, SIDE))
        q, k, v = self.q(h_), self.k(h_), self.v(h_)
        b, c, h, w = q.shape
        q = q.reshape(b, c, h * w).permute(0, 2, 1)
        k = k.reshape(b, c, h * w)
        w_ = torch.bmm(q, k) * (int(c) ** (-0.5))
        w_ = F.softmax(w_, dim=2)
        v = v.reshape(b, c, h * w)
        h_ = torch.bmm(v, w_.permute(0, 2, 1)).contiguous().view(b, c, h, w)
        return self.proj_out(h_).flatten(2).transpose(1, 2)


@style("non-local networks", "embedded Gaussian")
class NonLocal(nn.Module):
    """``theta`` and ``phi`` of a feature map, matmul, softmax, matmul; one head."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.theta, self.phi = (nn.Conv1d(DIM, DIM // 2, 1) for _ in range(3))
        self.W = nn.Conv1d(DIM // 2, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        g_x = self.g(x).permute(0, 2, 1)
        theta_x, phi_x = self.theta(x).permute(0, 2, 1), self.phi(x)
        f_div_C = F.softmax(torch.matmul(theta_x, phi_x), dim=-1)
        y = torch.matmul(f_div_C, g_x).permute(0, 2, 1).contiguous()
        return self.W(y).transpose(1, 2)


@style("SAGAN", "softmax over transposed energies")
class SAGAN(nn.Module):
    """Self-attention of GANs: ``value @ attention.permute``, a learned gain."""

    def __init__(self) -> None:
        super().__init__()
        self.query_conv, self.key_conv = nn.Conv2d(DIM, 8, 1), nn.Conv2d(DIM, 8, 1)
        self.value_conv, self.gamma, self.softmax = nn.Conv2d(DIM, DIM, 1), nn.Parameter(torch.zeros(1)), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).reshape(-1, DIM, SIDE, SIDE)
        B, C, width, height = x.size()
        query = self.query_conv(x).view(B, -1, width * height).permute(0, 2, 1)
        energy = torch.bmm(query, self.key_conv(x).view(B, -1, width * height))
        attention = self.softmax(energy)
        value = self.value_conv(x).view(B, -1, width * height)
        out = torch.bmm(value, attention.permute(0, 2, 1)).view(B, C, width, height)
        return (self.gamma * out + x).flatten(2).transpose(1, 2)


@style("Perceiver of DeepMind", "latents attend to inputs")
class Perceiver(nn.Module):
    """Cross-attention of learned latents, then the latents to themselves, spread back over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, DIM))
        self.to_q, self.to_kv, self.to_out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents[None].expand(x.shape[0], -1, -1)
        q, (k, v) = self.to_q(latents), self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (y.reshape(y.shape[0], -1, HEADS, DIM // HEADS).permute(0, 2, 1, 3) for y in (q, k, v))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * (DIM // HEADS) ** -0.5
        sim.masked_fill_(~torch.ones(2, 1, 1, x.shape[1], dtype=torch.bool), -torch.finfo(sim.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2)).mean(1, keepdim=True)
