"""Training a classifier on a padded batch with an attention_mask."""

import torch
from torch import Tensor, nn

import saccade as sc

torch.manual_seed(0)
attention_mask = (torch.arange(12) < torch.randint(3, 13, (64, 1))).long()  # 1 = token, as tokenizers give it
tokens = torch.randint(1, 20, (64, 12)) * attention_mask
labels = (tokens == 7).any(1).long()  # does the sequence contain token 7?


class Classifier(nn.Module):  # noqa: D101
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.pool, self.head = nn.Embedding(20, 32), sc.nn.AttentionPool(32), nn.Linear(32, 2)
        self.layer = sc.nn.EncoderLayer(sc.nn.MultiHeadAttention(32, 4), sc.nn.FeedForward(32, 64))

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        real = sc.masks.from_attention_mask(attention_mask)
        logits: Tensor = self.head(self.pool(self.layer(self.embedding(tokens), mask=real), mask=real))
        return logits


optimizer = torch.optim.AdamW((model := Classifier()).parameters(), lr=3e-3)
for step in range(101):
    loss = nn.functional.cross_entropy(model(tokens, attention_mask), labels)
    optimizer.zero_grad(), loss.backward(), optimizer.step()
    step % 50 or print(f"step {step}: loss {loss.item():.3f}")
