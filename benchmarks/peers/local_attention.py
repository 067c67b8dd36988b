"""The package local-attention, for the masks that its settings can express."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.peers.adapters import pairs, same_for_all_heads
from benchmarks.peers.peer import Library, Peer, imported, kit_cases, ruled
from saccade.testing.case import Case, Rule

__all__ = ["LOCAL_ATTENTION", "attend"]

_RULES: dict[str, Rule] = {
    "blocks-of-4": lambda b, h, q, kv: abs(q // 4 - kv // 4) <= 1,
    "window-of-4": lambda b, h, q, kv: abs(q - kv) <= 4,
    "window-past-padding": lambda b, h, q, kv: q - 4 <= kv <= q and kv < (3, 10)[b],
    "causal-padding-left": lambda b, h, q, kv: (4, 0)[b] <= kv <= q,
}
_Setting = dict[str, Any]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None, autopad: bool = False
) -> Tensor:
    """Call ``LocalAttention(window_size, ...)`` with the first setting that equals the mask; unseen keys are padding.

    With ``autopad`` only windows that do not divide the length are tried, so that the module has to pad.
    """
    seen = same_for_all_heads(mask)
    if query.shape[2:] != value.shape[2:] or 0 in query.shape:
        raise NotImplementedError("takes as many queries as keys, values as wide as them, and something of each")
    tokens = seen.any(1)
    for setting in _settings(seen.shape[1], autopad):
        if bool((_says(setting, seen) & tokens[:, None] == seen).all()):
            module = imported("local_attention").LocalAttention(
                **setting, scale=scale, autopad=autopad, use_rotary_pos_emb=False
            )
            heads = query.shape[1]
            padding = None if bool(tokens.all()) else tokens.repeat_interleave(heads, 0)
            out = module(*(x.flatten(0, 1) for x in (query, key, value)), mask=padding)
            return out.unflatten(0, (-1, heads))
    raise NotImplementedError("takes windows and blocks beside one another alone")


def _settings(length: int, autopad: bool) -> Iterator[_Setting]:
    """Yield every setting for a length, wide windows first."""
    for size in range(length, 0, -1):
        if autopad == bool(length % size):
            for back, ahead, exact in itertools.product((1, 0), (1, 0), (True, False)):
                base = {"window_size": size, "look_backward": back, "exact_windowsize": exact}
                yield {**base, "causal": False, "look_forward": ahead}
                if not ahead:
                    yield {**base, "causal": True, "look_forward": 0}


def _says(setting: _Setting, like: Tensor) -> Tensor:
    """Return the mask of a setting, bool ``[len, len]``."""
    q, kv = pairs(like)
    size, back, ahead = setting["window_size"], setting["look_backward"], setting["look_forward"]
    says = (kv // size >= q // size - back) & (kv // size <= q // size + ahead)
    if setting["exact_windowsize"]:
        says &= (q - kv <= size * back) & (setting["causal"] | (kv - q <= size * ahead))
    return says & (kv <= q) if setting["causal"] else says


def _cases() -> tuple[Case, ...]:
    return (
        *kit_cases(),
        *(
            ruled(f"{name}-{length}", rule, q_len=length, kv_len=length)
            for length in (12, 10)  # the window of 4 divides only the first
            for name, rule in _RULES.items()
        ),
    )


LOCAL_ATTENTION = Library(
    "local-attention",
    "local-attention",
    (
        Peer("LocalAttention(window_size)(q, k, v, mask)", attend, cases=_cases),
        Peer(
            "LocalAttention(window_size, autopad=True)(q, k, v, mask)",
            partial(attend, autopad=True),
            cases=_cases,
        ),
    ),
)
