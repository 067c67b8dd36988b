"""Capacity: how many pairs of key and value a state of fixed size can return."""

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
"""What is given back for each of the keys ``[n, d_k]`` after all of their values ``[n, d_v]`` were read."""


def recalled_by_best_state(key: Tensor, value: Tensor) -> Tensor:
    """Recall from the best state of d_k x d_v numbers, found by least squares."""
    return key @ torch.linalg.lstsq(key, value, driver="gelsd").solution


def recalled_by_delta_rule(key: Tensor, value: Tensor) -> Tensor:
    """Recall by DeltaNet: write each pair once, then query each key without writing."""
    both = torch.cat([key, key])[None, None]
    beta = torch.cat([torch.ones(len(key)), torch.zeros(len(key))]).to(key)[None, None]
    matrix = Delta(scale=1.0)(both, both, beta=beta, mask=Causal())
    found: Tensor = matrix @ torch.cat([value, torch.zeros_like(value)])[None, None]
    return found[0, 0, len(key) :]


def recalled_by_linear(key: Tensor, value: Tensor) -> Tensor:
    """Recall by linear attention with as many features as key entries."""
    found: Tensor = Linear("relu")(key[None, None], key[None, None]) @ value[None, None]
    return found[0, 0]


def recalled_by_attention(key: Tensor, value: Tensor) -> Tensor:
    """Recall by attention with sharp scores; it stores every pair, so its memory grows with n."""
    return attention(key[None, None], key[None, None], value[None, None], scale=1e4)[0, 0]


def _answered(draw: Draw, recall: Recall, pairs: int = 64, width: int = 16) -> float:
    """Return the share of right answers to `saccade.tasks.mqar`, with random unit vectors for tokens."""
    task = mqar(1, 4 * pairs, pairs, vocab_size=4 * pairs + 1, seed=draw.integer())
    read = task.tokens[0, : task.context_len].reshape(-1, 2)
    key, value = (torch.nn.functional.normalize(draw.normal(4 * pairs + 1, width), dim=-1) for _ in range(2))
    found = recall(key[read[:, 0]], value[read[:, 1]])
    order, asked = read[:, 0].argsort(), task.tokens[0, task.targets[0] >= 0]
    place = order[torch.searchsorted(read[order, 0], asked)]
    answer = (found[place] @ value.T).argmax(-1)
    return float((answer == task.targets[0, task.targets[0] >= 0]).double().mean())


@claim(
    latex=r"\min_S\lVert KS-V\rVert_F^2\ge n-d_k\quad\text{for}\ V^\top V=I",
    source="tutorials on recurrent networks; by the rank of KS; Schlag et al. 2021, arXiv:2102.11174, section 4.1",
    verdict="holds",
    conditions="the state has d_k x d_v entries and is read by a product with the key (features of the key count for "
    "d_k), and values are independent. Attention has no such limit, because it keeps all n pairs",
)
def a_fixed_state_limits_what_is_remembered(
    draw: Draw,
    *,
    best: Recall = recalled_by_best_state,
    delta: Recall = recalled_by_delta_rule,
    linear: Recall = recalled_by_linear,
    attend: Recall = recalled_by_attention,
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
    answered = {name: _answered(draw, recall) for name, recall in (("best", best), ("attention", attend))}
    yield at_most("recall of 64 pairs (mqar), any state, d_k = 16: share answered", answered["best"], 0.6)
    yield equal("recall of 64 pairs (mqar), attention: share answered", answered["attention"], 1.0)
    angles = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    circle = torch.stack([angles.cos(), angles.sin()], -1)
    yield at_most("attention, 16 keys on a circle, d_k = 2: squared error", lost(attend, circle), 1e-9)
