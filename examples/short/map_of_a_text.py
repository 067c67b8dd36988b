"""A map of 8,000 tokens: a head of a small language model that was trained on 256 tokens at a time.

Beyond that length its rotary positions repeat: it attends to tokens thousands back as if they were near.
"""

import warnings
from pydoc_data import topics

import torch

import saccade as sc
from saccade import models, viz

model = models.small_decoder()
assert model.tokenizer  # it comes with the weights
text = "\n".join(topics.topics.values())  # the documentation that comes with Python
tokens = torch.tensor([model.tokenizer.encode(text).ids[:8000]])

warnings.simplefilter("ignore", models.UntrainedLengthWarning)  # untrained distances are what is drawn
with sc.record(model, keep="qk") as recording, torch.no_grad():
    model.hidden(tokens)
A = recording[2].matrix  # of the third layer, 8,000 x 8,000 for each of 5 heads, never built
print(A)
seen = A.received()[0, 1]
for place in seen.topk(4).indices.tolist():
    print(f"token {place:,}, {model.tokenizer.decode([int(tokens[0, place])])!r}: {seen[place]:.0f} looks")
viz.save(viz.heatmap(A, head=1, title="Layer 2, head 1: 8,000 tokens of Python's documentation"), "map.png")
