"""Training on packed sequences: no padding, and each sequence as if it were alone, from cu_seqlens."""

import torch
from torch import nn

import saccade as sc
from saccade import masks, positions

torch.manual_seed(0)
texts = [torch.randint(0, 10, (1,)).repeat(n) for n in (5, 40, 17, 2)]  # each sequence repeats one number
packed = sc.pack(texts)  # tokens [1, 64], cu_seqlens [0, 5, 45, 62, 64]
mask = masks.from_cu_seqlens(packed.cu_seqlens)  # the layers' mask starts again in each sequence

heads = [sc.nn.MultiHeadAttention(32, 4, mask=masks.Causal(), rotary=positions.Rotary(8)) for _ in range(2)]
layers = [sc.nn.EncoderLayer(attention, sc.nn.FeedForward(32, 64)) for attention in heads]
model = nn.ModuleDict({"embed": nn.Embedding(10, 32), "stack": sc.nn.EncoderStack(layers), "head": nn.Linear(32, 10)})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(61):
    logits = model["head"](model["stack"](model["embed"](packed.tokens), mask=mask))
    each = zip(packed.unpack(logits), texts, strict=True)
    losses = [nn.functional.cross_entropy(own[:-1], text[1:], reduction="sum") for own, text in each]
    loss = torch.stack(losses).sum() / sum(len(text) - 1 for text in texts)
    optimizer.zero_grad(), loss.backward(), optimizer.step()
    if step % 30 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
