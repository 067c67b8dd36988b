"""Past: the keys and gates that the states of caches were made of, which a state does not tell any more."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from saccade.integrations.recurrence_calls import Tokens
from saccade.support.errors import unsupported

CALLED_AS = "record"  # in errors


class _Held(NamedTuple):
    """All tokens so far, and the state after them."""

    state: Tensor
    tokens: Tokens

    def of(self, rows: list[int]) -> _Held:
        """Chosen batch items, where beams have changed places."""
        own = (x if x is None or not isinstance(x, Tensor) else x[rows] for x in self.tokens)
        return _Held(self.state[rows], Tokens(*own))  # type: ignore[arg-type]


class Past:
    """What one recording holds of the tokens behind the states of a model's caches.

    The weights that a step gives to earlier tokens need their keys, and a recurrent layer's cache has none. So they
    are held here, as long as the cache lives. A state is known by what it says: who has changed one is not believed.

    Cost: memory of the keys, as a cache of softmax attention has; each call compares a state.
    """

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[Any, dict[str, _Held]] = WeakKeyDictionary()
        self._lock = threading.Lock()  # other threads may generate, each with a cache of its own

    def whole(self, name: str, cache: Any, new: Tokens, before: Tensor | None, after: Tensor | None) -> Tokens:
        """New tokens behind all that came before them.

        Args:
            name: of the layer.
            cache: in which the model keeps the state; None for no cache.
            new: the tokens of this call.
            before, after: the state that they went on from, and that after them; None for none.

        Raises:
            UnsupportedError: a state that no recorded call has left.
        """
        with self._lock:
            earlier = None if before is None else self._earlier(name, cache, before)
            whole = new if earlier is None else _behind(earlier.tokens, new)
            if cache is not None and after is not None:
                self._held.setdefault(cache, {})[name] = _Held(after.detach().clone(), _detached(whole))
            return whole

    def _earlier(self, name: str, cache: Any, before: Tensor) -> _Held | None:
        own = None if cache is None else self._held.get(cache)
        known = [held[name] for held in (own, *self._held.values()) if held is not None and name in held]
        for held in known:
            state = held.state.to(before)
            if state.shape == before.shape and torch.equal(state, before):
                return held
        for held in known:
            rows = _rows(held.state.to(before), before)
            if rows is not None:
                return held.of(rows)
        if not before.any():
            return None
        reason = f"{name} goes on from a state that no call recorded here has left, and its keys cannot be read from it"
        raise unsupported("a recurrence", [reason], hint="begin to record before the prompt")


def _rows(known: Tensor, wanted: Tensor) -> list[int] | None:
    """Which items of a known state those of another one are; None if one of them is none."""
    if known.shape[1:] != wanted.shape[1:]:
        return None
    found = [next((i for i, own in enumerate(known) if torch.equal(own, item)), -1) for item in wanted]
    return None if -1 in found else found


def _behind(earlier: Tokens, new: Tokens) -> Tokens:
    """New queries, and all keys."""
    key, decay = torch.cat([earlier.key, new.key], 2), torch.cat([earlier.decay, new.decay], 2)
    beta = None if earlier.beta is None or new.beta is None else torch.cat([earlier.beta, new.beta], 2)
    return new._replace(key=key, decay=decay, beta=beta)


def _detached(tokens: Tokens) -> Tokens:
    """Without a gradient, and without queries, which no later call asks for."""
    beta = None if tokens.beta is None else tokens.beta.detach()
    key = tokens.key.detach()
    return Tokens(tokens.rule, key[:, :, :0], key, tokens.decay.detach(), beta)
