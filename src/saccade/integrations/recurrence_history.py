"""History: the keys and gates of the tokens that the states of a model's caches were made of."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from saccade.integrations.recurrence_calls import Tokens
from saccade.support.errors import unsupported

__all__ = ["History"]

CALLED_AS = "record"  # in errors


class _State(NamedTuple):
    """A state, and all tokens that it was made of."""

    state: Tensor
    tokens: Tokens

    def of(self, rows: list[int]) -> _State:
        """Return the chosen batch items, after beams were reordered."""
        chosen = (x if x is None or not isinstance(x, Tensor) else x[rows] for x in self.tokens)
        return _State(self.state[rows], Tokens(*chosen))  # type: ignore[arg-type]


class History:
    """The tokens that the states of a model's caches were made of, for one recording.

    The weights of a decoding step need the keys of earlier tokens, and a recurrent layer's cache holds none. So they
    are stored here as long as the cache lives. A state is recognised by its contents, so a changed state is refused.

    Cost: memory of the keys, like a cache of softmax attention; each call compares a state.
    """

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Any, dict[str, _State]] = WeakKeyDictionary()
        self._lock = threading.Lock()  # other threads may generate, each with another cache

    def whole(self, name: str, cache: Any, new: Tokens, before: Tensor | None, after: Tensor | None) -> Tokens:
        """Return all tokens up to the end of a call, and remember them for the next one.

        Args:
            name: the layer's name.
            cache: the cache that holds the state; None for no cache.
            new: the tokens of this call.
            before, after: the states before and after the call; None for none.

        Raises:
            UnsupportedError: no recorded call left the state ``before``.
        """
        with self._lock:
            earlier = None if before is None else self._earlier(name, cache, before)
            whole = new if earlier is None else _appended(earlier.tokens, new)
            if cache is not None and after is not None:
                self._states.setdefault(cache, {})[name] = _State(after.detach().clone(), _detached(whole))
            return whole

    def _earlier(self, name: str, cache: Any, before: Tensor) -> _State | None:
        of_cache = None if cache is None else self._states.get(cache)
        by_layer = [states for states in (of_cache, *self._states.values()) if states is not None]
        known = [states[name] for states in by_layer if name in states]
        for one in known:
            state = one.state.to(before)
            if state.shape == before.shape and torch.equal(state, before):
                return one
        for one in known:
            rows = _rows(one.state.to(before), before)
            if rows is not None:
                return one.of(rows)
        if not before.any():
            return None
        reason = f"{name} goes on from a state that no call recorded here has left, and its keys cannot be read from it"
        raise unsupported("a recurrence", [reason], hint="begin to record before the prompt")


def _rows(known: Tensor, state: Tensor) -> list[int] | None:
    """Return the index in ``known`` of each batch item of ``state``; None if one is missing."""
    if known.shape[1:] != state.shape[1:]:
        return None
    rows = [next((i for i, item in enumerate(known) if torch.equal(item, one)), -1) for one in state]
    return None if -1 in rows else rows


def _appended(earlier: Tokens, new: Tokens) -> Tokens:
    """Return the new queries with all keys."""
    key, decay = torch.cat([earlier.key, new.key], 2), torch.cat([earlier.decay, new.decay], 2)
    beta = None if earlier.beta is None or new.beta is None else torch.cat([earlier.beta, new.beta], 2)
    return new._replace(key=key, decay=decay, beta=beta)


def _detached(tokens: Tokens) -> Tokens:
    """Return tokens without gradient and without queries, which no later call needs."""
    beta = None if tokens.beta is None else tokens.beta.detach()
    key = tokens.key.detach()
    return Tokens(tokens.rule, key[:, :, :0], key, tokens.decay.detach(), beta)
