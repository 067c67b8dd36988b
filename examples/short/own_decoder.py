"""A custom decoder with a cache: generation token by token equals the full run."""

import torch
from torch import Tensor, nn

import saccade as sc
from saccade import caches


class Decoder(nn.Module):  # noqa: D101
    def __init__(self, vocab: int = 50, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        mask = sc.masks.streaming(4, 16)  # four sink tokens and the last 16
        self.attention = sc.nn.MultiHeadAttention(dim, 4, num_kv_heads=2, mask=mask, rotary=sc.positions.Rotary(8))

    def forward(self, tokens: Tensor, cache: caches.LayerCache | None = None) -> Tensor:
        return nn.functional.linear(self.attention(self.embedding(tokens), cache=cache), self.embedding.weight)


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
