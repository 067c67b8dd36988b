"""Capture recurrences in transformers models: the functions that layers call, and lightning attention layers."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from saccade.integrations.capture_context import Capture, Listener, Make, emit_all, names_of, refuse_compiled
from saccade.integrations.forward_proxy import PATCH_LOCK, CapturedCall, Handler, Running, capture_forwards
from saccade.integrations.recurrence_calls import ATTRIBUTES, FUNCTIONS, Function, Tokens, lightning_tokens
from saccade.matrix import Matrix
from saccade.support.errors import unsupported

CALLED_AS = "record"  # the name in error messages

_LIGHTNING = "MiniMaxLightningAttention"


class _State(NamedTuple):
    """A recurrent state, and all tokens from which it was computed."""

    state: Tensor
    tokens: Tokens

    def select(self, rows: list[int]) -> _State:
        """Select the state and tokens of the given batch items, for example after beams are reordered."""
        chosen = (x if x is None or not isinstance(x, Tensor) else x[rows] for x in self.tokens)
        return _State(self.state[rows], Tokens(*chosen))  # type: ignore[arg-type]


class History:
    """The tokens from which the recurrent states in a model's caches were computed, stored for one recording.

    The weights of a decoding step depend on the keys of earlier tokens, but a recurrent layer's cache does not contain
    them. These keys are therefore stored here as long as the cache exists. A state is recognised by its contents, so
    a state that other code has changed raises an error.

    Cost: memory for the keys, like a cache of softmax attention; each call compares states.
    """

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Any, dict[str, _State]] = WeakKeyDictionary()
        self._lock = threading.Lock()  # other threads may be generating, each with its own cache

    def all_tokens(self, name: str, cache: Any, new: Tokens, before: Tensor | None, after: Tensor | None) -> Tokens:
        """Return all tokens up to the end of a recurrence call, and store them for the next call.

        Args:
            name: the layer's name.
            cache: the cache that contains the state; None if there is none.
            new: the tokens of the call.
            before, after: the states before and after the call; None if there is none.

        Raises:
            UnsupportedError: no recorded call produced the state ``before``.
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
        for candidate in known:
            state = candidate.state.to(before)
            if state.shape == before.shape and torch.equal(state, before):
                return candidate
        for candidate in known:
            rows = _matching_items(candidate.state.to(before), before)
            if rows is not None:
                return candidate.select(rows)
        if not before.any():
            return None
        reason = f"{name} continues from a state that was not recorded, and earlier keys cannot be read from it"
        raise unsupported("a recurrence", [reason], hint="start recording before the prompt")


def _matching_items(known: Tensor, state: Tensor) -> list[int] | None:
    """For each batch item of ``state``, return the index of the equal item in ``known``; None if any has no match."""
    if known.shape[1:] != state.shape[1:]:
        return None
    rows = [next((i for i, item in enumerate(known) if torch.equal(item, wanted)), -1) for wanted in state]
    return None if -1 in rows else rows


def _appended(earlier: Tokens, new: Tokens) -> Tokens:
    """Join the tokens of successive recurrence calls: all keys, but only the queries of the new tokens."""
    key, decay = torch.cat([earlier.key, new.key], 2), torch.cat([earlier.decay, new.decay], 2)
    beta = None if earlier.beta is None or new.beta is None else torch.cat([earlier.beta, new.beta], 2)
    return new._replace(key=key, decay=decay, beta=beta)


def _detached(tokens: Tokens) -> Tokens:
    """Detach a recurrence's tokens from the graph, and drop the queries, because later calls do not need them."""
    beta = None if tokens.beta is None else tokens.beta.detach()
    key = tokens.key.detach()
    return Tokens(tokens.rule, key[:, :, :0], key, tokens.decay.detach(), beta)


_running = Running()
_histories: WeakKeyDictionary[Capture, History] = WeakKeyDictionary()
_proxies: dict[tuple[int, str], _FunctionProxy] = {}


@contextmanager
def capture_recurrences(model: nn.Module, capture: Capture) -> Iterator[None]:
    """Capture the recurrence calls of transformers layers: delta rules, Mamba-2 and lightning attention.

    The layers run on their own functions or fast kernels. The matrix is built from the arguments of these functions, so
    it treats padding as the layer does: tokens that the layer sets to zero write nothing to the state.
    """
    modules = list(_captured_modules(names_of(model)))
    namespaces = {(id(one), name): one for module, _, _ in modules for one, name in _namespaces(module)}
    with ExitStack() as stack:
        _histories[capture] = History()
        for (_, name), namespace in namespaces.items():
            stack.enter_context(_patched(namespace, name))
        stack.enter_context(capture_forwards(modules, capture))
        yield


def is_recurrence(module: nn.Module) -> bool:
    """Return whether a module is a recurrence that can be captured."""
    return _is_lightning(cast("Hashable", type(module))) or bool(_namespaces(module))


def _captured_modules(names: dict[nn.Module, str]) -> Iterator[tuple[nn.Module, str, Handler]]:
    for module, name in names.items():
        if _is_lightning(cast("Hashable", type(module))):
            yield module, name, _capture_lightning
            yield module.get_submodule("qkv_proj"), name, _note_projection
        elif _namespaces(module):
            yield module, name, _capture_layer


@functools.lru_cache(512)
def _is_lightning(kind: Any) -> bool:
    return any(base.__name__ == _LIGHTNING for base in kind.__mro__)


def _namespaces(module: nn.Module) -> tuple[tuple[dict[str, Any], str], ...]:
    """Return the namespace (globals or attributes) and the name of each recurrence function that a module calls."""
    in_files, attributes = _namespaces_of_class(cast("Hashable", type(module))), vars(module)
    names = [name for name in ATTRIBUTES if name in attributes]
    return (*in_files, *((attributes, name) for name in names)) if names else in_files


@functools.lru_cache(512)
def _namespaces_of_class(kind: Any) -> tuple[tuple[dict[str, Any], str], ...]:
    bases = itertools.takewhile(lambda base: base is not nn.Module, kind.__mro__)
    methods = (inspect.unwrap(method) for base in bases for method in vars(base).values() if inspect.isfunction(method))
    return tuple(
        (method.__globals__, name)
        for method in filter(inspect.isfunction, methods)  # a decorator may wrap a compiled function, which has no code
        for name in method.__code__.co_names
        if name in FUNCTIONS and name in method.__globals__
    )


class _Layer(NamedTuple):
    """A running recurrent layer, with its listeners and the cache that was passed to it."""

    listeners: tuple[Listener, ...]
    cache: Any


class _FunctionProxy:
    """A replacement for a recurrence function that captures calls made by recorded layers.

    Calls by other layers, and calls after the last recording has ended, run the original function.

    Attributes:
        original: the original function.
        users: number of recordings that use the replacement.
    """

    def __init__(self, original: Callable[..., Any], function: Function):
        functools.update_wrapper(self, original)
        self.original, self._function, self.users = original, function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = _running.stack[-1] if self.users and _running.stack else None
        if not isinstance(layer, _Layer):
            return self.original(*args, **kwargs)
        function, arguments = self._function, dict(zip(self._function.names, args, strict=False)) | kwargs
        before = arguments.get(function.state)
        before = None if before is None else before.detach().clone()  # decoding steps may modify it in place
        out = self.original(*args, **kwargs)
        _emit_call(layer, lambda: function.tokens(arguments), before, function.final_state(arguments, out))
        return out

    def __reduce__(self) -> Any:
        """Let copies and pickles hold the original function, so that copies of a recorded model are not recorded."""
        return copy.copy, (self.original,)


@contextmanager
def _patched(namespace: dict[str, Any], name: str) -> Iterator[None]:
    key = (id(namespace), name)
    with PATCH_LOCK:
        if key not in _proxies:
            function = FUNCTIONS.get(name) or ATTRIBUTES[name]
            namespace[name] = _proxies[key] = _FunctionProxy(namespace[name], function)
        proxy = _proxies[key]
        proxy.users += 1
    try:
        yield
    finally:
        with PATCH_LOCK:
            proxy.users -= 1
            if not proxy.users:
                del _proxies[key]
                # If other code has since wrapped the proxy, it stays in place and only calls the original.
                if namespace.get(name) is proxy:
                    namespace[name] = proxy.original


def _capture_layer(call: CapturedCall) -> Any:
    refuse_compiled()
    with _running.within(_Layer(call.listeners, _cache_of(call))):
        return call.run()


def _capture_lightning(call: CapturedCall) -> Any:
    refuse_compiled()
    module: Any = call.module
    cache, projection = _cache_of(call), _Projection(module.qkv_proj)
    before = cache.get_linear_cache(module.layer_idx) if hasattr(cache, "get_linear_cache") else None
    with _running.within(projection):
        out = call.run()
    mask = call.kwargs.get("attention_mask", call.args[2] if len(call.args) > 2 else None)

    def tokens() -> Tokens:
        assert projection.out is not None
        projected = module.act_fn(projection.out)
        projected = projected if mask is None else projected * mask[:, :, None]
        heads = projected.unflatten(2, (module.num_attention_heads, -1))
        return lightning_tokens(heads, module.slope_rate.flatten())

    if projection.out is not None:
        _emit_call(_Layer(call.listeners, cache), tokens, before if isinstance(before, Tensor) else None, out[1])
    return out


@dataclass
class _Projection:
    """The projection module of a running lightning attention layer, and the projection's output."""

    module: nn.Module
    out: Tensor | None = None


def _note_projection(call: CapturedCall) -> Any:
    out = call.run()
    for running in _running.stack[-1:]:
        if isinstance(running, _Projection) and running.module is call.module:
            running.out = out
    return out


def _cache_of(call: CapturedCall) -> Any:
    """Return the cache among the arguments of a recurrent layer, under any name, or None if there is none."""
    return next((x for x in (*call.args, *call.kwargs.values()) if hasattr(x, "get_seq_length")), None)


def _emit_call(layer: _Layer, tokens: Callable[[], Tokens], before: Tensor | None, after: Tensor | None) -> None:
    """Emit a recurrence call to all listeners, including the earlier tokens that each capture has stored."""

    def making(listener: Listener) -> Make:
        def make() -> Matrix:
            return _histories[listener.capture].all_tokens(listener.name, layer.cache, tokens(), before, after).matrix()

        return make

    emit_all([(listener, making(listener)) for listener in layer.listeners])
