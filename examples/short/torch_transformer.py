"""nn.Transformer on our attention: the same weights, the same loss."""

import torch
from torch import nn

import saccade as sc

torch.manual_seed(0)
model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
source, target = torch.randn(3, 20, 32), torch.randn(3, 10, 32)
padding = torch.arange(20) >= torch.tensor([[20], [12], [5]])  # True = ignore, as in torch
facts = {
    "tgt_mask": nn.Transformer.generate_square_subsequent_mask(10),
    "src_key_padding_mask": padding,
    "memory_key_padding_mask": padding,
}

before = model(source, target, **facts).square().mean()
for one in sc.replace_attention(model):
    print(f"{one.name}: {one.before} -> {one.after}")
after = model(source, target, **facts).square().mean()
print(f"loss before {before.item():.6f}, after {after.item():.6f}")
assert torch.allclose(before, after, atol=1e-6)
after.backward()  # trains as before: the parameters are the same objects
