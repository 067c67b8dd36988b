"""Block-sparse attention of BigBird in transformers, without its projections, for the masks that it supports."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.adapters import pick, picked, tokens_of
from benchmarks.peers.peer import Library, Peer, imported, ruled
from saccade.testing.case import Case, Rule

__all__ = ["BIGBIRD", "attend", "drawn", "module"]

_BLOCK, _HEADS, _HEAD_DIM, _RANDOM, _SEED = 2, 4, 8, 1, 0
_LENGTHS = (18, 24)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, training: bool) -> Tensor:
    """Run the module: global first and last block, a window of three blocks and, in training, random blocks."""
    x, length = tokens_of(query, key, value), mask.shape[2]
    if query.shape[1] != _HEADS or length not in _LENGTHS:
        raise NotImplementedError(f"is asked for {_HEADS} heads and lengths of {' and '.join(map(str, _LENGTHS))}")
    tokens = mask.any(2).any(1)
    supported = _says(length, training).to(mask.device) & tokens[:, None, None] & tokens[:, None, :, None]
    if not bool((supported == mask).all()):
        raise NotImplementedError("takes its own pattern alone, with padding")
    block_sparse = module(_HEADS * query.shape[3]).train(training)
    blocked, band, rows, columns = imported("transformers").BigBirdModel.create_masks_for_block_sparse_attn(
        tokens.to(x.dtype), _BLOCK
    )
    state = np.random.get_state()  # the module reseeds NumPy's generator
    out, _ = block_sparse(x, band, rows, columns, blocked, blocked)
    np.random.set_state(state)
    return picked(out, query)


def drawn(length: int) -> list[list[int]]:
    """Return the random block of each block of queries, for each head, as the module draws it with its seed."""
    block_sparse, state = module(_HEADS * _HEAD_DIM).train(), np.random.get_state()
    np.random.seed(_SEED)
    plan = block_sparse._get_rand_attn_plan(length, _BLOCK, _RANDOM)
    blocks = block_sparse._bigbird_block_rand_mask_with_head(length, length, _BLOCK, _BLOCK, _HEADS, *plan)
    np.random.set_state(state)
    return [[int(row[0]) for row in head] for head in blocks]


@cache
def _says(length: int, training: bool) -> Tensor:
    """Return the pattern of the module, bool ``[1, heads, len, len]``."""
    rule = _rule(length, training)
    rows = [[[rule(0, h, q, kv) for kv in range(length)] for q in range(length)] for h in range(_HEADS)]
    return torch.tensor([rows])


def _rule(length: int, training: bool) -> Rule:
    last = length // _BLOCK - 1
    draws = drawn(length) if training else None

    def rule(b: int, h: int, q: int, kv: int) -> bool:
        row, column = q // _BLOCK, kv // _BLOCK
        if {row, column} & {0, last} or abs(row - column) <= 1:
            return True
        return draws is not None and column == draws[h][row - 1]

    return rule


def _cases(training: bool) -> tuple[Case, ...]:
    heads = {"num_heads": _HEADS, "num_kv_heads": _HEADS}
    plain = [ruled(f"bigbird-{n}", _rule(n, training), q_len=n, kv_len=n, **heads) for n in _LENGTHS]
    rule, length = _rule(_LENGTHS[0], training), _LENGTHS[0]
    tokens = (length, length - 3)

    def padded(b: int, h: int, q: int, kv: int) -> bool:
        return max(q, kv) < tokens[b] and rule(b, h, q, kv)

    return (*plain, ruled("bigbird-padding", padded, q_len=length, kv_len=length, **heads))


@cache
def module(width: int) -> Any:
    """Build BigBird's attention: four heads, `width` features in all, blocks of two tokens."""
    config = imported("transformers").BigBirdConfig(
        hidden_size=width, num_attention_heads=_HEADS, block_size=_BLOCK, num_random_blocks=_RANDOM
    )
    big_bird = imported("transformers.models.big_bird.modeling_big_bird")
    attention = big_bird.BigBirdBlockSparseAttention(config, seed=_SEED)
    pick(attention, _HEADS, "", widened=False)
    return attention


def _peer(call: str, training: bool) -> Peer:
    return Peer(call, partial(attend, training=training), cases=partial(_cases, training))


BIGBIRD = Library(
    "bigbird",
    "transformers",
    (
        _peer("BigBirdBlockSparseAttention(config).train()(x, …)", training=True),
        _peer("BigBirdBlockSparseAttention(config).eval()(x, …)", training=False),
    ),
)
