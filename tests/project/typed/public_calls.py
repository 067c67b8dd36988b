"""Public calls with the types that type checkers must infer; never run, but checked by `test_type_checkers`."""

from contextlib import AbstractContextManager
from typing import assert_type

import torch
from torch import Tensor, nn

import saccade as sc
from saccade import caches, models, positions, scores, statistics
from saccade.matrix import Matrix
from saccade.mechanisms.comparison import Comparison
from saccade.recording.layer_record import Run

query, key, value = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)

# Masks and their algebra.
causal = sc.masks.Causal()
assert_type(causal, sc.masks.Causal)
assert_type(causal & sc.masks.Window(4, 0), sc.masks.Mask)
assert_type(causal | sc.masks.Global([0]), sc.masks.Mask)
assert_type(~causal, sc.masks.Mask)
assert_type(sc.masks.parse("causal & window(3, 0)"), sc.masks.Mask)
assert_type(sc.masks.longformer(4, [0]), sc.masks.Mask)
assert_type(causal.picture(4), str)

# The function and the matrix.
assert_type(sc.attention(query, key, value, causal), Tensor)
assert_type(sc.attention(query, key, value, lambda b, h, q, kv: q >= kv, score=scores.Cosine()), Tensor)
assert_type(sc.attention_with_lse(query, key, value), tuple[Tensor, Tensor])
A = sc.AttentionMatrix(query, key, causal, bias=positions.ALiBi(4))
assert_type(A, sc.AttentionMatrix)
assert_type(A @ value, Tensor)
assert_type(A.mT @ value, Tensor)
assert_type(A[0, 0, 3], Tensor)
assert_type(A.to_dense(), Tensor)
assert_type(A.entropy(), Tensor)
assert_type(A.topk(2), statistics.Strongest)
assert_type(A.summary(), statistics.Summary)
assert_type(A.to("cpu"), sc.AttentionMatrix)
assert_type(A.shape, tuple[int, int, int, int])
either: Matrix = A

# The cost of a mask, and the attention of a model.
assert_type(sc.cost(causal, 1024), sc.Cost)
assert_type(sc.compare(query, key, value, [sc.mechanisms.Linear()]), Comparison)
model = nn.Linear(4, 4)
assert_type(sc.record(model), AbstractContextManager[sc.Recording])
with sc.record(model) as recording:
    assert_type(recording, sc.Recording)
    assert_type(recording[0], Run)
    assert_type(recording[0].matrix, Matrix)
assert_type(sc.replace_attention(model), sc.Replacements)
packed = sc.pack([torch.zeros(3), torch.zeros(4)])
assert_type(packed, sc.Packed)
assert_type(packed.tokens, Tensor)
assert_type(packed.unpack(query), tuple[Tensor, ...])

# Layers, caches, models.
layer = sc.nn.MultiHeadAttention(16, 4, num_kv_heads=2, mask=causal, rotary=positions.Rotary(4))
cache = layer.new_cache()
assert_type(layer(torch.zeros(1, 8, 16), cache=cache), Tensor)
assert_type(sc.nn.EncoderLayer(layer, sc.nn.FeedForward(16, 32))(torch.zeros(1, 8, 16)), Tensor)
assert_type(cache, caches.LayerCache | caches.Cache)  # with a short convolution, a Cache of two
assert_type(cache.length, int)
assert_type(caches.KVCache(64).fork(), caches.KVCache)
assert_type(models.small_decoder(), models.Decoder)
assert_type(models.small_decoder().new_cache(), caches.Cache)
