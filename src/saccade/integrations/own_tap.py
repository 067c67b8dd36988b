"""The tap of our own modules: mechanisms make matrices, and this hands them out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from saccade.caches import LayerCache, RecurrentCache
from saccade.errors import unsupported
from saccade.integrations.tap import Valve
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism

__all__ = ["tapped_mechanisms"]


@contextmanager
def tapped_mechanisms(model: nn.Module, valve: Valve) -> Iterator[None]:
    """Hand out each matrix that a mechanism makes, under the name of the layer that holds the mechanism."""
    owner: dict[nn.Module, str] = {}  # who of those that hold a mechanism ran last: several may share one
    with ExitStack() as stack:
        for name, holder in model.named_modules(remove_duplicate=False):
            if not isinstance(holder, Mechanism):
                name = name or type(model).__name__  # noqa: PLW2901
                for child in holder.children():
                    if isinstance(child, Mechanism):
                        handle = holder.register_forward_pre_hook(_noting(child, name, owner), with_kwargs=True)
                        stack.callback(handle.remove)
        for name, mechanism in model.named_modules():
            if isinstance(mechanism, Mechanism):
                own = name or type(model).__name__
                stack.callback(mechanism.register_forward_hook(_handing_out(own, owner, valve)).remove)
        yield


def _noting(mechanism: nn.Module, name: str, owner: dict[nn.Module, str]) -> Any:
    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        del args
        owner[mechanism] = name
        cache = kwargs.get("cache")
        if isinstance(cache, RecurrentCache) and cache.length:
            reason = f"the cache of {name} holds a sum, in which the keys of earlier tokens cannot be told apart"
            hint = "caches.KVCache() keeps the tokens, and fits every mechanism"
            raise unsupported("record", type(module).__name__, [reason], hint=hint)
        if isinstance(cache, LayerCache) and not isinstance(cache, RecurrentCache) and not cache.hands_on_all:
            reason = f"the {type(cache).__name__} of {name} hands on some of the keys, in an order of its own"
            hint = "caches.KVCache() hands on all, and what the other would leave out can be asked of its matrix"
            raise unsupported("record", type(module).__name__, [reason], hint=hint)

    return note


def _handing_out(own: str, owner: dict[nn.Module, str], valve: Valve) -> Any:
    def hand_out(mechanism: nn.Module, args: Any, matrix: Matrix) -> None:
        del args
        valve.hand_out(owner.get(mechanism, own), lambda: matrix)

    return hand_out
