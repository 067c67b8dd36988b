"""The tap of our own modules: hands out each matrix that a mechanism makes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

from saccade.caches import LayerCache, RecurrentCache
from saccade.integrations.capture_context import Ear, Valve, names_of
from saccade.integrations.forward_proxy import HeardCall, Running, listening
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism
from saccade.support.errors import unsupported

CALLED_AS = "record"  # in errors


@contextmanager
def tapped_mechanisms(model: nn.Module, valve: Valve) -> Iterator[None]:
    """Hand out each matrix that a mechanism makes, under the name of the layer that holds the mechanism.

    Where several layers share a mechanism, it is the one that runs; and where none of them does, since a mechanism was
    called by itself, the mechanism's own name.
    """
    names = names_of(model)
    holders: dict[nn.Module, list[nn.Module]] = {}
    with ExitStack() as stack:
        for module, name in names.items():
            own = [] if isinstance(module, Mechanism) else [x for x in module.children() if isinstance(x, Mechanism)]
            for mechanism in own:
                holders.setdefault(mechanism, []).append(module)
            if own:
                stack.enter_context(listening([(module, name, _note_holder)], valve))
        for module, name in names.items():
            if isinstance(module, Mechanism):
                those = holders.get(module, [])
                default = names[those[0]] if len(those) == 1 else name
                stack.callback(module.register_forward_hook(_Hook(Ear(default, valve), those)).remove)
        yield


class _Holder(NamedTuple):
    """A layer that runs and holds a mechanism, and who listens to it."""

    holder: nn.Module
    ear: Ear


_running = Running()


def _note_holder(call: HeardCall) -> Any:
    _check_cache(call.module, call.ears[0].name, call.kwargs.get("cache"))
    with _running.within(*(_Holder(call.module, ear) for ear in call.ears)):
        return call.run()


def _check_cache(module: nn.Module, name: str, cache: object) -> None:
    if isinstance(cache, RecurrentCache) and cache.length:
        reason = f"the cache of {name} holds a sum, in which the keys of earlier tokens cannot be told apart"
        hint = "caches.KVCache() keeps the tokens, and fits every mechanism"
        raise unsupported(type(module).__name__, [reason], hint=hint)
    if isinstance(cache, LayerCache) and not isinstance(cache, RecurrentCache) and not cache.exposes_all_keys:
        reason = f"the {type(cache).__name__} of {name} hands on some of the keys, in an order of its own"
        hint = "caches.KVCache() hands on all, and what the other would leave out can be asked of its matrix"
        raise unsupported(type(module).__name__, [reason], hint=hint)


class _Hook:
    """A forward hook that hands out each matrix that a mechanism made."""

    def __init__(self, ear: Ear, holders: list[nn.Module]):
        self._ear, self._holders = ear, holders

    def __call__(self, mechanism: nn.Module, args: Any, matrix: Matrix) -> None:
        default, valve = self._ear
        own = (one for one in reversed(_running.stack) if one.ear.valve is valve and one.holder in self._holders)
        layer = next(own, None)
        if layer is not None or not _runs_above(sys._getframe(), self._holders):
            valve.hand_out(default if layer is None else layer.ear.name, lambda: matrix)

    def __reduce__(self) -> Any:
        """A copy of a model that somebody listens to is a model to which nobody does."""
        return functools.partial, (_silent,)


def _runs_above(frame: FrameType | None, holders: list[nn.Module]) -> bool:
    """Whether one of these layers is in the middle of a call that began before the recording did."""
    codes = {inspect.unwrap(type(holder).forward).__code__ for holder in holders}
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") in holders:
            return True
        frame = frame.f_back
    return False


def _silent(*args: Any) -> None:
    del args
