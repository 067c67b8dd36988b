"""``FastAttention`` of performer-pytorch, judged by a dense form of its estimate."""

from __future__ import annotations

import contextlib
import io
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.adapters import causal_with_padding
from benchmarks.peers.peer import Library, Peer, imported, named
from saccade.testing.case import Case
from saccade.testing.problem import Problem

__all__ = ["PERFORMER", "attend", "estimate"]

_EPS, _CAUSAL_EPS = 1e-4, 1e-6  # added by the package to each feature, and to the divisor of causal rows


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, causal: bool) -> Tensor:
    """Call ``FastAttention(head_dim, causal=causal)``; a causal step gets zeros for its missing earlier queries."""
    if causal:
        if not bool(causal_with_padding(mask).all()):
            raise NotImplementedError("takes no padding")
        before = key.shape[2] - query.shape[2]
        if before < 0:
            raise NotImplementedError("takes no more queries than keys")
        out = _module(query.shape[3], True)(torch.nn.functional.pad(query, (0, 0, before, 0)), key, value)
        return out[:, :, before:]
    if not bool(mask.all()):
        raise NotImplementedError("takes no mask")
    return _module(query.shape[3], False)(query, key, value)


def estimate(problem: Problem, *, causal: bool) -> Tensor:
    """Compute it densely: the weight of a pair is the product of its features, divided by the sum of its row."""
    projection = _module(problem.query.shape[3], False).projection_matrix.double()
    width = problem.query.shape[3] ** -0.25
    features = []
    for x, over in ((problem.query, (-1,)), (problem.ungrouped().key, (-1, -2))):
        along = width * x.double() @ projection.T
        size = (width * x.double()).square().sum(-1, keepdim=True) / 2
        features.append(torch.exp(along - size - along.amax(over, keepdim=True)) + _EPS)
    weights = (features[0] @ features[1].transpose(2, 3)) * problem.allowed
    total = weights.sum(-1, keepdim=True)
    if causal:  # the features lack a factor that cancels in the quotient
        total = total + _CAUSAL_EPS * projection.shape[0] ** 0.5 * features[0].sum(-1, keepdim=True)
    return weights / total @ problem.ungrouped().value.double()


@cache
def _module(head_dim: int, causal: bool) -> Any:
    with (
        torch.random.fork_rng(devices=()),
        contextlib.redirect_stdout(io.StringIO()),
    ):  # it prints failed imports
        torch.manual_seed(0)  # both forms draw the same features
        return imported("performer_pytorch").FastAttention(head_dim, nb_features=16, causal=causal)


def _cases(causal: bool) -> tuple[Case, ...]:
    if causal:
        return named("one-token", "causal", "causal-extend", "causal-decode", "widths-differ")
    return named("none", "full", "one-head", "no-heads-share", "more-keys", "more-queries")


def _peer(call: str, causal: bool) -> Peer:
    return Peer(
        call,
        partial(attend, causal=causal),
        cases=partial(_cases, causal),
        definition=partial(estimate, causal=causal),
        left_out=("half_precision",),
    )


PERFORMER = Library(
    "performer-pytorch",
    "performer-pytorch",
    (
        _peer("FastAttention(dim_heads, nb_features)(q, k, v)", False),
        _peer("FastAttention(dim_heads, nb_features, causal=True)(q, k, v)", True),
    ),
)
