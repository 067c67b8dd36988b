"""Masks stand where they are asked, whatever the default device is."""

import pytest
import torch

import saccade as sc
from saccade import masks

TOKENS = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8])
MASKS = {
    "global": lambda: masks.Causal() & masks.Global([0, 2]),
    "padding": lambda: masks.Padding([5, 8]),
    "padding left": lambda: masks.Padding([5, 8], side="left", padded_len=8),
    "documents": lambda: masks.Documents([[3, 5], [8]]),
    "blocks": lambda: masks.Blocks([[True, False], [True, True]], 4),
    "random": lambda: masks.Random(4, 2),
    "dense": lambda: masks.Dense(TOKENS[:, None, None, :].bool()),
    "function": lambda: masks.Predicate(lambda b, h, q, kv: (q + kv + b) % 3 != 0),
    "by item": lambda: masks.PerItem([masks.Causal(), masks.Window(2, 2)]),
    "grid": lambda: masks.Neighborhood(2, 4, 1),
    "a key padding mask": lambda: masks.from_key_padding_mask(TOKENS.bool()),
    "an attention mask": lambda: masks.from_attention_mask(TOKENS),
    "ends of documents": lambda: masks.from_cu_seqlens([0, 3, 8], masks.Causal()),
    "a text": lambda: masks.parse("causal & (window(2, 0) | global(0))"),
}
QUERY, KEY, VALUE = torch.randn(3, 2, 2, 8, 4)


def products(mask):
    return [sc.attention(QUERY, KEY, VALUE, mask, impl=impl) for impl in ("auto", "fused", "tiled", "reference")]


def answers(mask):
    matrix = sc.AttentionMatrix(QUERY, KEY, mask)
    parts = matrix[0, 1, 2], matrix[0, 1, 2:7:2, 1:6], matrix.entropy(), matrix.topk(2).weights, matrix.pooled(2)
    return [*products(mask), *parts, mask.to_dense(8, batch=2, heads=2), torch.as_tensor(mask.density(8), device="cpu")]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_made_elsewhere(name):
    with torch.device("meta"):
        mask = MASKS[name]()
    assert all(map(torch.equal, products(mask), products(MASKS[name]())))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_asked_elsewhere(name):
    expected, seen = answers(MASKS[name]()), MASKS[name]().picture(8)
    with torch.device("meta"):
        mask = MASKS[name]()
        found = answers(mask)
        assert mask.picture(8) == seen
    assert all(map(torch.equal, found, expected))
