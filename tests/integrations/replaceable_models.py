"""Models whose attention is replaced."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

D, H = 16, 4


class One(nn.Module):
    """A model with one attention."""

    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(D, H, **options).double()
        for weight in self.inner.parameters():
            nn.init.normal_(weight, std=0.3)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class TimmForm(nn.Module):
    """The form of timm's Attention."""

    def __init__(self, dim=D, heads=H, *, norms=False, wrong=False):
        super().__init__()
        self.num_heads, self.head_dim, self.scale = heads, dim // heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(dim // heads) if norms else nn.Identity()
        self.k_norm = nn.LayerNorm(dim // heads) if norms else nn.Identity()
        self.attn_drop, self.proj_drop, self.wrong = nn.Dropout(0.0), nn.Dropout(0.0), wrong

    def forward(self, x, attn_mask=None, is_causal=False):
        batch, n, width = x.shape
        qkv = self.qkv(x).reshape(batch, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask, self.attn_drop.p if self.training else 0.0, is_causal)
        x = self.proj_drop(self.proj(x.transpose(1, 2).reshape(batch, n, width)))
        return 2 * x if self.wrong else x


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()
