"""Self-attention of Longformer in transformers, without its projections, for the masks that it supports."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.adapters import pairs, pick, picked, same_for_all_heads, tokens_of
from benchmarks.peers.peer import Library, Peer, imported, kit_cases, ruled
from saccade.testing.case import Case

__all__ = ["LONGFORMER", "attend"]

_GLOBALS = ((0,), (2, 5))


def _cases() -> tuple[Case, ...]:
    sizes = {"q_len": 8, "kv_len": 8}
    return (
        *kit_cases(),
        ruled("window-8", lambda b, h, q, kv: abs(q - kv) <= 2, **sizes),
        ruled("window-12", lambda b, h, q, kv: abs(q - kv) <= 2, q_len=12, kv_len=12),
        ruled("window-padding", lambda b, h, q, kv: max(q, kv) < (5, 8)[b] and abs(q - kv) <= 2, **sizes),
        ruled("longformer-8", lambda b, h, q, kv: _sees(q, kv, (0, 4)), **sizes),
        ruled("longformer-per-item", lambda b, h, q, kv: _sees(q, kv, _GLOBALS[b]), **sizes),
        ruled("longformer-padding", lambda b, h, q, kv: max(q, kv) < (5, 8)[b] and _sees(q, kv, (0,)), **sizes),
    )


def _sees(q: int, kv: int, tokens: tuple[int, ...]) -> bool:
    return abs(q - kv) <= 2 or q in tokens or kv in tokens


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Run the module with the first window that equals the mask; tokens that see and are seen by all are global.

    A token that no query sees is padding. Its output is 0, so it may see no key.
    """
    x, seen = tokens_of(query, key, value), same_for_all_heads(mask)
    tokens = seen.any(1)
    globals_ = ((seen == tokens[:, None]).all(2) & (seen == tokens[..., None]).all(1)) & tokens
    length = seen.shape[1]
    q, kv = pairs(seen)
    for side in range(2, length // 2 + 1):  # the module cannot split attention_window=2 into chunks
        for marked in (torch.zeros_like(globals_), globals_):
            says = ((q - kv).abs() <= side) | marked[..., None] | marked[:, None]
            if length % (2 * side) == 0 and bool((says & tokens[..., None] & tokens[:, None] == seen).all()):
                module = _module(query.shape[1], query.shape[3], 2 * side)
                marks = torch.zeros_like(x[:, :, 0]).masked_fill(marked, 10000.0).masked_fill(~tokens, -10000.0)
                out = module(x, marks, marks < 0, marks > 0, bool(marked.any()))[0]
                return picked(out, query)
    raise NotImplementedError("takes windows and global tokens alone, of lengths that twice the window divides")


@cache
def _module(heads: int, head_dim: int, window: int) -> Any:
    config = imported("transformers").LongformerConfig(
        hidden_size=3 * heads * head_dim,
        num_attention_heads=heads,
        attention_window=[window],
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )
    longformer = imported("transformers.models.longformer.modeling_longformer")
    module = longformer.LongformerSelfAttention(config, 0).eval()
    pick(module, heads, "", "_global", widened=True)
    return module


LONGFORMER = Library(
    "longformer",
    "transformers",
    (
        # It always computes softmax in float32.
        Peer(
            "LongformerSelfAttention(config, 0)(x, …)",
            attend,
            dtype=torch.float32,
            cases=_cases,
            left_out=("gradcheck",),
        ),
    ),
)
