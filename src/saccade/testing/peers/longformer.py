"""The self-attention of transformers' Longformer, its projections made to pick, for the masks that it can say."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from saccade.testing.case import Case
from saccade.testing.peers.expressed import pairs, same_for_all_heads
from saccade.testing.peers.imported import imported
from saccade.testing.peers.peer import Library, Peer, kit_cases, ruled
from saccade.testing.peers.picking import pick, picked, tokens_of

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
    """The first window that says the mask, tokens that see all and are seen by all being global.

    A token that nobody sees is padding, and gives 0: it must see nobody.
    """
    x, seen = tokens_of(query, key, value), same_for_all_heads(mask)
    tokens = seen.any(1)
    globals_ = ((seen == tokens[:, None]).all(2) & (seen == tokens[..., None]).all(1)) & tokens
    length = seen.shape[1]
    q, kv = pairs(seen)
    for side in range(2, length // 2 + 1):  # of attention_window=2 the module cannot make its chunks
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
        # Its softmax is computed in float32, whatever it is given.
        Peer(
            "LongformerSelfAttention(config, 0)(x, …)",
            attend,
            dtype=torch.float32,
            cases=_cases,
            left_out=("gradcheck",),
        ),
    ),
)
