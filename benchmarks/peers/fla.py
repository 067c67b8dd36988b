"""Reference functions of flash-linear-attention (``naive``), loaded without the package, which imports Triton."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.adapters import causal_with_padding, pairs
from benchmarks.peers.peer import Library, Peer, named
from saccade.testing import shared_masks
from saccade.testing.case import Case
from saccade.testing.problem import Problem

__all__ = ["FLA", "causal_cases", "delta", "linear", "naive"]


@cache
def naive(name: str) -> ModuleType:
    """Load ``naive.py`` of a folder of ``fla.ops`` without the packages around it."""
    package = PathFinder.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("fla is not installed: pip install fla-core", name="fla")
    path = Path(package.submodule_search_locations[0], "ops", name, "naive.py")
    spec = importlib.util.spec_from_file_location(f"_fla_{name.replace('/', '_')}_naive", path)
    assert spec is not None  # a Python file always has a spec
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    sink_logit: Tensor | None = None,
) -> Tensor:
    """Call ``naive_parallel_attn`` with the flag or the window that equals the mask."""
    if query.shape[2] != key.shape[2] or 0 in mask.shape:
        raise NotImplementedError("takes as many queries as keys, and something of each")
    q, kv = pairs(mask)
    for size in (None, *range(mask.shape[3], 0, -1)):
        says = torch.ones_like(mask) if size is None else ((kv <= q) & (q - kv < size)).expand_as(mask)
        if torch.equal(mask, says):
            tensors = (x.transpose(1, 2) for x in (query, key, value))
            options = {"causal": size is not None, "window_size": size}
            out, _ = naive("attn").naive_parallel_attn(*tensors, scale=scale, sink_bias=sink_logit, **options)
            return out.transpose(1, 2)
    raise NotImplementedError("takes causal masks and causal windows alone, or none")


def recurrent_linear(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Call ``naive_recurrent_linear_attn(normalize=True)`` on features; pass earlier keys as a state."""
    function, before = naive("linear_attn").naive_recurrent_linear_attn, _earlier(query, key, mask)
    q, k, v = (x.transpose(1, 2) for x in (_features(query), _features(key), value))
    state = None
    if before:
        first = (k[:, :before], k[:, :before], v[:, :before])  # only the state is used, so any queries will do
        _, state = function(*first, normalize=True, output_final_state=True)
    out, _ = function(q, k[:, before:], v[:, before:], normalize=True, initial_state=state)
    return out.transpose(1, 2)


def recurrent_delta(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Call ``delta_rule_recurrence``."""
    function, before = naive("delta_rule").delta_rule_recurrence, _earlier(query, key, mask)
    k, beta, _ = _gates(key)
    state = None
    if before:
        _, state = function(k[:, :, :before], k[:, :, :before], value[:, :, :before], beta[:, :, :before])
    rest = slice(before, None)
    return function(query, k[:, :, rest], value[:, :, rest], beta[:, :, rest], initial_state=state)[0]


def gated_delta(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, form: str) -> Tensor:
    """Call ``naive_recurrent_gated_delta_rule`` or ``naive_chunk_gated_delta_rule``."""
    function, before = getattr(naive("gated_delta_rule"), form), _earlier(query, key, mask)
    keys, beta, decay = _gates(key)
    q, k, v = (x.transpose(1, 2) for x in (query, keys, value))
    gates = {"beta": beta.transpose(1, 2), "g": decay.transpose(1, 2)}
    state = None
    if before:
        first, early = slice(0, before), {name: gate[:, :before] for name, gate in gates.items()}
        _, state = function(q=k[:, first], k=k[:, first], v=v[:, first], **early, output_final_state=True)
    late = {name: gate[:, before:] for name, gate in gates.items()}
    return function(q=q, k=k[:, before:], v=v[:, before:], **late, initial_state=state)[0].transpose(1, 2)


def linear(problem: Problem) -> Tensor:
    """Compute it densely: the weight of a pair is the product of its features, divided by the sum of its row."""
    p = problem.ungrouped()
    weights = (_features(p.query.double()) @ _features(p.key.double()).transpose(2, 3)) * p.allowed
    return weights / weights.sum(-1, keepdim=True) @ p.value.double()


def delta(problem: Problem, *, gated: bool) -> Tensor:
    """Compute it densely: the writes of all keys solve a triangular system; a query reads those up to its position."""
    p = problem.ungrouped()
    k, beta, decay = _gates(p.key.double())
    total = decay.cumsum(-1) if gated else torch.zeros_like(decay)
    decays = (total[..., :, None] - total[..., None, :]).tril().exp()
    ahead = (k @ k.transpose(2, 3) * decays).tril(-1) * beta[..., None]
    eye = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
    written = torch.linalg.solve_triangular(eye + ahead, beta[..., None] * p.value.double(), upper=False)
    rows = slice(k.shape[2] - p.query.shape[2], None)
    read = p.query.double() @ k.transpose(2, 3) * p.query.shape[3] ** -0.5 * decays[:, :, rows]
    return (read * p.allowed) @ written


def _features(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _gates(key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys of length 1, the write strength of each and its log decay, all computed from the token."""
    return F.normalize(key, dim=-1), key[..., 0].sigmoid(), F.logsigmoid(key[..., 1])


def _earlier(query: Tensor, key: Tensor, mask: Tensor) -> int:
    """Return the number of keys before the first query."""
    if not bool(causal_with_padding(mask).all()) or query.shape[2] > key.shape[2]:
        raise NotImplementedError("takes only causal masks, without padding, and no more queries than keys")
    return key.shape[2] - query.shape[2]


def causal_cases() -> tuple[Case, ...]:
    """Return causal cases of a few tokens, and one of 70, more than a chunk."""
    long = Case("causal-70", *shared_masks.CAUSAL, batch=1, num_heads=2, num_kv_heads=1, q_len=70, kv_len=70)
    return (*named("one-token", "causal", "causal-extend", "causal-decode", "widths-differ"), long)


# They compute in float32, and no softmax. Under a delta rule weights need not sum to 1, and the order of keys matters.
_NOT_OF_SUMS = ("gradcheck", "half_precision")
_NOT_OF_RULES = (*_NOT_OF_SUMS, "ones", "key_order")


FLA = Library(
    "fla",
    "fla-core",
    (
        Peer("naive_parallel_attn(q, k, v, causal, window_size)", softmax, gqa=True),
        Peer(
            "naive_recurrent_linear_attn(q, k, v, normalize=True)",
            recurrent_linear,
            dtype=torch.float32,
            cases=causal_cases,
            definition=linear,
            left_out=_NOT_OF_SUMS,
        ),
        Peer(
            "delta_rule_recurrence(q, k, v, beta)",
            recurrent_delta,
            dtype=torch.float32,
            cases=causal_cases,
            definition=partial(delta, gated=False),
            left_out=_NOT_OF_RULES,
        ),
        *(
            Peer(
                f"{form}(q, k, v, beta, g)",
                partial(gated_delta, form=form),
                dtype=torch.float32,
                cases=causal_cases,
                definition=partial(delta, gated=True),
                left_out=_NOT_OF_RULES,
            )
            for form in ("naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule")
        ),
    ),
)
