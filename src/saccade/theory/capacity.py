"""The claim that a state of fixed size limits how many key-value pairs can be stored and recalled."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Causal
from saccade.matrix import attention
from saccade.mechanisms import Delta, Linear
from saccade.tasks import mqar
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most, equal

Recall = Callable[[Tensor, Tensor], Tensor]
"""A function that stores keys ``[n, d_k]`` with values ``[n, d_v]``, and returns the value recalled for each key."""


def recalled_by_best_state(key: Tensor, value: Tensor) -> Tensor:
    """Recall values by multiplying the keys by the best state matrix ``[d_k, d_v]``, found by least squares."""
    return key @ torch.linalg.lstsq(key, value, driver="gelsd").solution


def recalled_by_delta_rule(key: Tensor, value: Tensor) -> Tensor:
    """Recall values by the delta rule (DeltaNet): write each key-value pair once, then read with all keys."""
    twice = torch.cat([key, key])[None, None]
    beta = torch.cat([torch.ones(len(key)), torch.zeros(len(key))]).to(key)[None, None]
    matrix = Delta(scale=1.0)(twice, twice, beta=beta, mask=Causal())
    recalled: Tensor = matrix @ torch.cat([value, torch.zeros_like(value)])[None, None]
    return recalled[0, 0, len(key) :]


def recalled_by_linear(key: Tensor, value: Tensor) -> Tensor:
    """Recall values with linear attention, with one feature per key entry."""
    recalled: Tensor = Linear("relu")(key[None, None], key[None, None]) @ value[None, None]
    return recalled[0, 0]


def recalled_by_attention(key: Tensor, value: Tensor) -> Tensor:
    """Recall values by softmax attention with sharp scores. Its memory grows with the number of stored pairs."""
    return attention(key[None, None], key[None, None], value[None, None], scale=1e4)[0, 0]


def recalled_by_one_number(keys: list[int], values: list[int], base: int) -> list[int]:
    """Recall values below ``base`` from a single integer, in which the digit at position ``key`` is the key's value."""
    state = 0
    for key, value in zip(keys, values, strict=True):
        state += value * base**key
    return [state // base**key % base for key in keys]


def _recall_accuracy(draw: Draw, recall: Recall, pairs: int = 64, width: int = 16) -> float:
    """Return the share of values recalled on the task `saccade.tasks.mqar`; tokens are embedded as random unit vectors.

    Every token has one vector as a key and a different one as a value.
    """
    task = mqar(1, 4 * pairs, pairs, vocab_size=4 * pairs + 1, seed=draw.integer())
    read = task.tokens[0, : task.context_len].reshape(-1, 2)
    key, value = (torch.nn.functional.normalize(draw.normal(4 * pairs + 1, width), dim=-1) for _ in range(2))
    recalled = recall(key[read[:, 0]], value[read[:, 1]])
    order, queried = read[:, 0].argsort(), task.tokens[0, task.targets[0] >= 0]
    index = order[torch.searchsorted(read[order, 0], queried)]
    answer = (recalled[index] @ value.T).argmax(-1)
    return float((answer == task.targets[0, task.targets[0] >= 0]).double().mean())


@claim(
    latex=r"\min_S\lVert KS-V\rVert_F^2\ge n-d_k\quad\text{for}\ VV^\top=I",
    source="tutorials on recurrent networks; by the rank of KS; Schlag et al. 2021, arXiv:2102.11174, section 4.1",
    verdict="holds if",
    conditions="the state has d_k x d_v entries and is read by a product with the key (features of the key count for "
    "d_k), and values are independent; or its numbers have finite precision. A state of one exact number, read digit "
    "by digit, recalls every pair. Attention has no such limit, because it keeps all n pairs",
)
def a_fixed_state_limits_what_is_remembered(
    draw: Draw,
    *,
    best: Recall = recalled_by_best_state,
    delta: Recall = recalled_by_delta_rule,
    linear: Recall = recalled_by_linear,
    attend: Recall = recalled_by_attention,
    exact: Callable[[list[int], list[int], int], list[int]] = recalled_by_one_number,
) -> Measurements:
    """The fixed size of its state limits the memory of a recurrence; attention has no such limit."""
    n, width = 16, 8
    values = torch.eye(n, dtype=torch.float64)
    crowded = torch.nn.functional.normalize(draw.normal(n, width), dim=-1)
    turned = torch.linalg.qr(draw.normal(width, width)).Q

    def lost(recall: Recall, key: Tensor) -> float:
        return float((recall(key, values[: len(key)]) - values[: len(key)]).square().sum())

    yield equal("any state, 8 pairs, d_k = 8: least squared error", lost(best, turned), 0.0)
    yield equal("any state, 16 pairs: least squared error, against n - d_k", lost(best, crowded), n - width, 1e-9)
    yield equal("delta rule, 8 orthogonal keys: squared error", lost(delta, turned), 0.0)
    yield at_least("delta rule, 16 keys: squared error, against n - d_k", lost(delta, crowded), n - width, 1e-9)
    yield equal("linear attention, 8 axes as keys: squared error", lost(linear, values[:width, :width]), 0.0)
    yield at_least("linear attention, 16 keys: squared error, against n - d_k", lost(linear, crowded), n - width, 1e-9)
    yield at_most("attention, the same 16 keys: squared error", lost(attend, crowded), 1e-9)
    accuracy = {name: _recall_accuracy(draw, recall) for name, recall in (("best", best), ("attention", attend))}
    yield at_most("recall of 64 pairs (mqar), any state, d_k = 16: share answered", accuracy["best"], 0.6)
    yield equal("recall of 64 pairs (mqar), attention: share answered", accuracy["attention"], 1.0)
    angles = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    circle = torch.stack([angles.cos(), angles.sin()], -1)
    yield at_most("attention, 16 keys on a circle, d_k = 2: squared error", lost(attend, circle), 1e-9)
    keys, stored = draw.permutation(64).tolist(), draw.permutation(64).tolist()
    recalled = sum(answer == value for answer, value in zip(exact(keys, stored, 64), stored, strict=True))
    yield equal("recall of 64 pairs, a state of one exact number: share answered", recalled / 64, 1.0)
