"""Capture each attention matrix that a mechanism in saccade's own modules returns."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

from saccade.caches import LayerCache, RecurrentCache
from saccade.integrations.call_output import FutureOutput, WatchedMatrix
from saccade.integrations.capture_context import Capture, Listener, names_of
from saccade.integrations.forward_proxy import CapturedCall, Running, capture_forwards
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism
from saccade.support.errors import unsupported

CALLED_AS = "record"  # the name in error messages


@contextmanager
def capture_mechanisms(model: nn.Module, capture: Capture) -> Iterator[None]:
    """Capture each matrix that a saccade mechanism returns, under the name of the layer that contains the mechanism.

    If several layers share a mechanism, the running layer's name is used. If the mechanism was called directly, its
    own name is used.
    """
    names = names_of(model)
    holders = holders_of(names)
    with ExitStack() as stack:
        for layer in dict.fromkeys(layer for layers in holders.values() for layer in layers):
            stack.enter_context(capture_forwards([(layer, names[layer], _note_holder)], capture))
        for mechanism, layers in holders.items():
            default = names[layers[0] if len(layers) == 1 else mechanism]
            stack.callback(mechanism.register_forward_hook(_Hook(Listener(default, capture), layers)).remove)
        yield


def holders_of(modules: Iterable[nn.Module]) -> dict[Mechanism, list[nn.Module]]:
    """Return the mechanisms among a model's modules, each with the layers that contain it."""
    holders: dict[Mechanism, list[nn.Module]] = {}
    for module in modules:
        if isinstance(module, Mechanism):
            holders.setdefault(module, [])
            continue
        for child in module.children():
            if isinstance(child, Mechanism):
                holders.setdefault(child, []).append(module)
    return holders


class _Holder(NamedTuple):
    """A running layer that contains a mechanism, with a listener for its calls."""

    holder: nn.Module
    listener: Listener


_running = Running()


def _note_holder(call: CapturedCall) -> Any:
    _check_cache(call.module, call.listeners[0].name, call.kwargs.get("cache"))
    with _running.within(*(_Holder(call.module, listener) for listener in call.listeners)):
        return call.run()


def _check_cache(module: nn.Module, name: str, cache: object) -> None:
    if isinstance(cache, RecurrentCache) and cache.length:
        reason = f"the cache of {name} stores a sum, in which the keys of earlier tokens cannot be distinguished"
        hint = "caches.KVCache() keeps all tokens and works with every mechanism"
        raise unsupported(type(module).__name__, [reason], hint=hint)
    if isinstance(cache, LayerCache) and not isinstance(cache, RecurrentCache) and not cache.exposes_all_keys:
        reason = f"the {type(cache).__name__} of {name} returns only some of the keys, in a different order"
        hint = "record a run without a cache; caches.KVCache() returns all keys, if the layer supports it"
        raise unsupported(type(module).__name__, [reason], hint=hint)


class _Hook:
    """A forward hook that emits each matrix a mechanism returns, and wraps the matrix if its gradient is requested."""

    def __init__(self, listener: Listener, holders: list[nn.Module]):
        self._listener, self._holders = listener, holders

    def __call__(self, mechanism: nn.Module, args: Any, matrix: Matrix) -> Matrix | None:
        default, capture = self._listener
        running = (entry for entry in reversed(_running.stack) if entry.listener.capture is capture)
        layer = next((entry for entry in running if entry.holder in self._holders), None)
        if layer is not None or not _runs_above(sys._getframe(), self._holders):
            output = FutureOutput()
            capture.emit(default if layer is None else layer.listener.name, lambda: matrix, output)
            return WatchedMatrix(matrix, output) if output.is_watched else None
        return None

    def __reduce__(self) -> Any:
        """Let copies and pickles hold a hook that does nothing, so that copies of a recorded model are not recorded."""
        return functools.partial, (_do_nothing,)


def _runs_above(frame: FrameType | None, holders: list[nn.Module]) -> bool:
    """Return whether one of the layers is running in a call that began before the recording."""
    codes = {inspect.unwrap(type(holder).forward).__code__ for holder in holders}
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") in holders:
            return True
        frame = frame.f_back
    return False


def _do_nothing(*args: Any) -> None:
    del args
