"""More reference functions of flash-linear-attention: recurrences, and the branches of native sparse attention.

Recurrences are compared with the definitions of `saccade.testing.adapters.recurrent`, which computes their gates from
the keys. The functions of native sparse attention are softmax attention over some blocks of keys; in blocks of one
token, they can express causal masks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.adapters import pairs
from benchmarks.peers.fla import causal_cases, naive
from benchmarks.peers.peer import Library, Peer
from saccade.testing import adapters
from saccade.testing.adapters import Form

__all__ = ["FLA_NAIVE"]

_CHUNK = 64


def _run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, form: Form) -> Tensor:
    out = form(query, key, value, mask)
    assert isinstance(out, Tensor)
    return out


def _recurrence(call: str, make: Callable[[], Form], *, dtype: torch.dtype = torch.float32) -> Peer:
    """Return the entry of a recurrence, computed in float32 unless a wider dtype is kept."""
    form = make()
    return Peer(
        call,
        partial(_run, form=form),
        dtype=dtype,
        cases=causal_cases,
        definition=form.definition,
        left_out=form.left_out,
    )


def _at(name: str, function: str) -> Callable[..., Any]:
    """Return a function that is loaded when it is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(naive(name), function)(*arguments, **options)

    call.__name__ = function
    return call


def _chunk_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Pad the sequence to a multiple of 64 with zeros, which change no earlier output."""
    length = q.shape[1]
    padded = (F.pad(x, (0, 0, 0, 0, 0, -length % _CHUNK)) for x in (q, k, v))
    out: Tensor = naive("linear_attn").naive_chunk_linear_attn(*padded)
    return out[:, :length]


def _simple(function: str) -> Callable[..., Any]:
    """Call a function of simple GLA with the arguments of a state space model, whose step is part of the values."""

    def call(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, **states: Any) -> Any:
        known = {"initial_states": "initial_state", "return_final_states": "output_final_state"}
        options = {known[name]: state for name, state in states.items()}
        result = getattr(naive("simple_gla"), function)(c, b, x * dt[..., None], dt * rates, scale=1.0, **options)
        return result if states else result[0]

    return call


def _divisor(length: int) -> int:
    """Return the longest chunk of at most 64 tokens that divides the length."""
    return max(size for size in range(1, _CHUNK + 1) if length % size == 0)


def _delta_chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    out: Tensor = naive("delta_rule").delta_rule_chunkwise(q, k, v, beta, chunk_size=_divisor(q.shape[2]))[0]
    return out


def _delta_parallel(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    size = _divisor(q.shape[2])
    out: Tensor = naive("delta_rule").delta_rule_parallel(q, k, v, beta, BM=size, BN=size)[0]
    return out


def _delta_product(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **states: Any) -> Any:
    function = naive("gated_delta_product").naive_recurrent_gated_delta_product
    return function(q, k, v, g, beta, q.shape[3] ** -0.5, **states)


def _kda_chunks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return naive("kda").naive_chunk_kda(q, k, v, chunk_size=_divisor(q.shape[1]), **options)


def _dplr(function: str) -> Callable[..., Any]:
    def call(q: Tensor, k: Tensor, v: Tensor, *, a: Tensor, b: Tensor, gk: Tensor, **states: Any) -> Any:
        more = {"chunk_size": _divisor(q.shape[2])} if function == "dplr_chunkwise" else {}
        return getattr(naive("generalized_delta_rule/dplr"), function)(q, k, v, a, b, gk, **more, **states)

    return call


@cache
def _sparse() -> ModuleType:
    """Load ``fla.ops.nsa.naive`` with stand-ins for the two functions that it imports from modules with kernels."""
    names = ("fla", "fla.ops", "fla.ops.utils", "fla.ops.utils.pooling")
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        module: Any = ModuleType(name)
        module.prepare_chunk_offsets = module.mean_pooling = None  # for packed and uncompressed keys
        sys.modules[name] = module
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ImportWarning)  # flash-attn is not installed
            return naive("nsa")
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def selection(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Call ``naive_nsa_selection`` with the visible keys as selected blocks of one token; -1 selects nothing.

    The function that selects blocks always selects a query's own, so rows without a visible key are not passed.
    """
    groups = mask.unflatten(1, (key.shape[1], -1)) if 0 not in mask.shape else mask[:, :, None]
    q, kv = pairs(mask)
    if mask.shape[2] != mask.shape[3] or 0 in mask.shape or bool((mask & (kv > q)).any()):
        raise NotImplementedError("takes as many queries as keys, none of them empty, and shows no later key")
    if not torch.equal(groups, groups[:, :, :1].expand_as(groups)) or not bool(mask.any(-1).all()):
        raise NotImplementedError("takes one mask for the heads of a group, with a visible key in every row")
    blocks = torch.where(groups[:, :, 0].transpose(1, 2), torch.arange(mask.shape[3], device=mask.device), -1)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out: Tensor = _sparse().naive_nsa_selection(q, k, v, blocks, block_size=1, scale=scale)
    return out.transpose(1, 2)


def compression(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Call ``naive_nsa_compression`` with blocks of one token, which a query sees up to its own."""
    return compression_with_lse(query, key, value, mask, scale=scale)[0]


def compression_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output and the lse of ``naive_nsa_compression``."""
    q, kv = pairs(mask)
    if mask.shape[2] != mask.shape[3] or 0 in mask.shape or not torch.equal(mask, (kv <= q).expand_as(mask)):
        raise NotImplementedError("takes as many queries as keys, none of them empty, and causal masks")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    factor = query.shape[3] ** -0.5 if scale is None else scale
    out, lse = _sparse().naive_nsa_compression(q, k, v, 1, factor)
    return out.transpose(1, 2), lse.transpose(1, 2)


_NO_STATE: dict[str, Any] = {"returns_state": False}
_FIRST: dict[str, Any] = {"head_first": True}
_recurrent = adapters.recurrent


FLA_NAIVE = Library(
    "fla",
    "fla-core",
    (
        _recurrence(
            "naive_chunk_linear_attn(q, k, v)",
            lambda: _recurrent(_chunk_linear, "linear", **_NO_STATE),
            dtype=torch.float64,
        ),
        _recurrence(
            "naive_recurrent_gla(q, k, v, gk)",
            lambda: _recurrent(_at("gla", "naive_recurrent_gla"), "gla", names={"g": "gk"}),
        ),
        *(
            _recurrence(f"{form}(q, k, v, g)", partial(_recurrent, _simple(form), "ssd", returns_state=has_state))
            for form, has_state in (
                ("naive_recurrent_simple_gla", True),
                ("naive_chunk_simple_gla", True),
                ("naive_parallel_simple_gla", False),
            )
        ),
        _recurrence(
            "delta_rule_chunkwise(q, k, v, beta, chunk_size)",
            lambda: _recurrent(_delta_chunks, "delta", **_FIRST, **_NO_STATE),
            dtype=torch.float64,
        ),
        _recurrence(
            "delta_rule_parallel(q, k, v, beta, BM, BN)",
            lambda: _recurrent(_delta_parallel, "delta", **_FIRST, **_NO_STATE),
            dtype=torch.float64,
        ),
        *(
            _recurrence(f"{form}(q, k, v, beta, g)", partial(_recurrent, _at("gated_delta_rule", form), "gated_delta"))
            for form in ("naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule")
        ),
        _recurrence(
            "naive_recurrent_gated_delta_product(q, k, v, g, beta, scale)",
            lambda: _recurrent(_delta_product, "gated_delta"),
        ),
        _recurrence(
            "naive_recurrent_kda(q, k, v, g, beta)", lambda: _recurrent(_at("kda", "naive_recurrent_kda"), "kda")
        ),
        _recurrence("naive_chunk_kda(q, k, v, g, beta, chunk_size)", lambda: _recurrent(_kda_chunks, "kda")),
        *(
            _recurrence(
                f"{form}(q, k, v, alpha, beta, gk)",
                partial(_recurrent, _dplr(form), "rwkv7", names={"g": "gk"}, **_FIRST),
            )
            for form in ("dplr_recurrence", "dplr_chunkwise")
        ),
        Peer(
            "naive_nsa_selection(q, k, v, block_indices, block_size=1)",
            selection,
            gqa=True,
            dtype=torch.float32,
            left_out=("gradcheck",),
        ),
        Peer(
            "naive_nsa_compression(q, k, v, block_size=1, scale)",
            compression,
            with_lse=compression_with_lse,
            gqa=True,
            dtype=torch.float32,
            left_out=("gradcheck",),
        ),
    ),
)
