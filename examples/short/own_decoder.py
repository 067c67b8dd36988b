"""A decoder of one's own with a cache: what is generated token by token is what the full run says."""

import torch
from torch import nn

import saccade as sc


class Decoder(nn.Module):  # noqa: D101
    def __init__(self, vocab=50, dim=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        parts = {"mask": sc.masks.streaming(4, 16), "rotary": sc.positions.Rotary(8)}  # four sinks, and the last 16
        self.attention = sc.nn.MultiHeadAttention(dim, 4, num_kv_heads=2, **parts)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens, cache=None):
        return self.head(self.attention(self.embedding(tokens), cache=cache))


torch.manual_seed(0)
model = Decoder().eval()
cache, tokens = model.attention.new_cache(), torch.tensor([[1, 2, 3]])
with torch.no_grad():
    logits = model(tokens, cache)  # prefill
    for _ in range(40):
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        logits = model(tokens[:, -1:], cache)  # decode
    assert torch.allclose(logits[:, -1], model(tokens)[:, -1], atol=1e-5)
print(tokens[0].tolist())
