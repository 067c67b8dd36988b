"""A GPT-2 of transformers on our attention: the same loss, then with a window in one line."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import saccade as sc
from saccade import masks

torch.manual_seed(0)
config = GPT2Config(vocab_size=100, n_positions=512, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()
tokens = torch.randint(0, 100, (1, 512))

before = model(tokens, labels=tokens).loss
print([one.name for one in sc.replace_attention(model)])
after = model(tokens, labels=tokens).loss
print(f"loss before {before.item():.6f}, after {after.item():.6f}")
assert torch.allclose(before, after, atol=1e-6)

sc.replace_attention(model, mask=masks.sliding_window(64))  # the last 64 tokens only, in linear time
print(f"with a window of 64: {model(tokens, labels=tokens).loss.item():.6f}")
