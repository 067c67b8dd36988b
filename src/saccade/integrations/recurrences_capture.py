"""The tap of recurrences in transformers: beside the functions that layers call, and lightning attention's forward."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from saccade.integrations.capture_context import Ear, Make, Valve, hand_out, names_of, refuse_compiled
from saccade.integrations.forward_proxy import CHANGING, HeardCall, Kind, Running, listening
from saccade.integrations.recurrence_calls import ATTRIBUTES, FUNCTIONS, Function, Tokens, lightning_tokens
from saccade.integrations.recurrence_history import Past
from saccade.matrix import Matrix

CALLED_AS = "record"  # in errors

_LIGHTNING = "MiniMaxLightningAttention"

_running = Running()
_pasts: WeakKeyDictionary[Valve, Past] = WeakKeyDictionary()
_stand_ins: dict[tuple[int, str], _StandIn] = {}


@contextmanager
def tapped_recurrences(model: nn.Module, valve: Valve) -> Iterator[None]:
    """Hand out each call of a recurrence that a layer of transformers makes: delta rules, Mamba-2, lightning attention.

    The layers run as they do, on the functions or fast kernels that they have. Their arguments are what the matrix is
    made of, so that padding stands in it as the layer has it: what it zeroes writes nothing.
    """
    heard = list(_heard(names_of(model)))
    places = {(id(one), name): one for module, _, _ in heard for one, name in _places(module)}
    with ExitStack() as stack:
        _pasts[valve] = Past()
        for (_, name), namespace in places.items():
            stack.enter_context(_standing_in(namespace, name))
        stack.enter_context(listening(heard, valve))
        yield


def is_recurrence(module: nn.Module) -> bool:
    """Whether a module is a recurrence that this tap knows."""
    return _is_lightning(cast("Hashable", type(module))) or bool(_places(module))


def _heard(names: dict[nn.Module, str]) -> Iterator[tuple[nn.Module, str, Kind]]:
    for module, name in names.items():
        if _is_lightning(cast("Hashable", type(module))):
            yield module, name, _hear_lightning
            yield module.get_submodule("qkv_proj"), name, _note_projection
        elif _places(module):
            yield module, name, _hear_layer


@functools.lru_cache(512)
def _is_lightning(kind: Any) -> bool:
    return any(base.__name__ == _LIGHTNING for base in kind.__mro__)


def _places(module: nn.Module) -> tuple[tuple[dict[str, Any], str], ...]:
    """Where the functions stand that a module calls: in the file of its class, or among its attributes."""
    found, own = _places_in_files(cast("Hashable", type(module))), vars(module)
    attributes = [name for name in ATTRIBUTES if name in own]
    return (*found, *((own, name) for name in attributes)) if attributes else found


@functools.lru_cache(512)
def _places_in_files(kind: Any) -> tuple[tuple[dict[str, Any], str], ...]:
    bases = itertools.takewhile(lambda base: base is not nn.Module, kind.__mro__)
    own = (inspect.unwrap(one) for base in bases for one in vars(base).values() if inspect.isfunction(one))
    return tuple(
        (one.__globals__, name)
        for one in own
        for name in one.__code__.co_names
        if name in FUNCTIONS and name in one.__globals__
    )


class _Layer(NamedTuple):
    """A recurrent layer that runs, who listens to it, and the cache that it was given."""

    ears: tuple[Ear, ...]
    cache: Any


class _StandIn:
    """Stands where models look for a function while somebody records, and hands out the calls of those who listen.

    Called by any other layer, or when nobody records any more, it is the function.

    Attributes:
        original: the function.
        users: how many recordings it stands there for.
    """

    def __init__(self, original: Callable[..., Any], function: Function):
        functools.update_wrapper(self, original)
        self.original, self._function, self.users = original, function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = _running.stack[-1] if self.users and _running.stack else None
        if not isinstance(layer, _Layer):
            return self.original(*args, **kwargs)
        function, given = self._function, dict(zip(self._function.names, args, strict=False)) | kwargs
        before = given.get(function.state)
        before = None if before is None else before.detach().clone()  # steps may write into it
        out = self.original(*args, **kwargs)
        _tell(layer, lambda: function.tokens(given), before, function.last(given, out))
        return out

    def __reduce__(self) -> Any:
        """A copy of a model that somebody listens to is a model to which nobody does."""
        return copy.copy, (self.original,)


@contextmanager
def _standing_in(namespace: dict[str, Any], name: str) -> Iterator[None]:
    key = (id(namespace), name)
    with CHANGING:
        if key not in _stand_ins:
            function = FUNCTIONS.get(name) or ATTRIBUTES[name]
            namespace[name] = _stand_ins[key] = _StandIn(namespace[name], function)
        one = _stand_ins[key]
        one.users += 1
    try:
        yield
    finally:
        with CHANGING:
            one.users -= 1
            if not one.users:
                del _stand_ins[key]
                # Where somebody has put a function of theirs on top, ours stays below it, and does nothing.
                if namespace.get(name) is one:
                    namespace[name] = one.original


def _hear_layer(call: HeardCall) -> Any:
    refuse_compiled()
    with _running.within(_Layer(call.ears, _cache_of(call))):
        return call.run()


def _hear_lightning(call: HeardCall) -> Any:
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
        _tell(_Layer(call.ears, cache), tokens, before if isinstance(before, Tensor) else None, out[1])
    return out


@dataclass
class _Projection:
    """What a lightning attention that runs has projected its tokens to."""

    module: nn.Module
    out: Tensor | None = None


def _note_projection(call: HeardCall) -> Any:
    out = call.run()
    for one in _running.stack[-1:]:
        if isinstance(one, _Projection) and one.module is call.module:
            one.out = out
    return out


def _cache_of(call: HeardCall) -> Any:
    """The cache that a layer was given, whatever it calls it; None for none."""
    return next((x for x in (*call.args, *call.kwargs.values()) if hasattr(x, "get_seq_length")), None)


def _tell(layer: _Layer, tokens: Callable[[], Tokens], before: Tensor | None, after: Tensor | None) -> None:
    """Hand a call out to all who listen, each of whom holds what came before."""

    def making(ear: Ear) -> Make:
        def make() -> Matrix:
            return _pasts[ear.valve].whole(ear.name, layer.cache, tokens(), before, after).matrix()

        return make

    hand_out([(ear, making(ear)) for ear in layer.ears])
