"""The tap of transformers: wraps the function that a layer gets from the attention interface."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from saccade.integrations.attention_call import AttentionCall
from saccade.integrations.capture_context import (
    Ear,
    Make,
    Valve,
    closed,
    hand_out,
    names_of,
)
from saccade.integrations.forward_proxy import CHANGING
from saccade.integrations.lazy_mask import LazyMask, Placed
from saccade.integrations.mask_functions import place
from saccade.integrations.run_matrices import collected_matrices
from saccade.integrations.sdpa_capture import hearing_products, without_mode
from saccade.integrations.tensor_masks import mask_of_tensor
from saccade.matrix import AttentionMatrix, Matrix
from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_tracing

CALLED_AS = "record"  # in errors

_REMEMBERED = 8
_SMALL = 1 << 20
_STANDARD = ("eager", "sdpa", "flex_attention")  # and those named "flash...": they honour their arguments
_listeners: tuple[_Listener, ...] = ()  # replaced, never changed: other threads may be going through it
_restore: list[Callable[[], None]] = []


@contextmanager
def tapped_interface(model: nn.Module, valve: Valve) -> Iterator[None]:
    """Hand out each call of an attention function that a module of ``model`` makes, whichever implementation is set.

    The configuration stays as it is, and so do masks and kernels. Masks are read from the function that they are made
    of, not from the tensor. Nothing happens where no model of transformers has been imported.
    """
    if sys.modules.get("transformers.modeling_utils") is None:
        yield
        return
    global _listeners  # noqa: PLW0603  as there is one interface
    listener = _Listener(names_of(model), valve)
    with CHANGING:
        if not _listeners:
            _restore.append(_tap())
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with CHANGING:
            _listeners = tuple(other for other in _listeners if other is not listener)
            if not _listeners:
                _restore.pop()()


class _Listener:
    def __init__(self, names: dict[nn.Module, str], valve: Valve):
        self.names, self.valve = names, valve
        self._known: dict[int, _Known] = {}
        self._latest: tuple[Placed, ...] = ()  # replaced, never changed: several threads may make masks

    def learn(self, mask: Any, placed: Placed) -> None:
        """Remember what a mask stands for, as long as it lives, and for a while what its copy would."""
        number = id(mask)
        self._latest = (placed, *self._latest[: _REMEMBERED - 1])
        self._known[number] = _Known(weakref.ref(mask, lambda _: self._known.pop(number, None)), placed, _version(mask))

    def meaning_of(self, mask: Any, batch: int, device: torch.device) -> Any:
        """The rule behind a mask, where it is known; else the mask.

        A mask that somebody has written into since it was made is not the one that is known. `generate` copies masks
        for a static cache: small ones are recognised by what they say. So are those without a count of changes.
        """
        known = self._known.get(id(mask))
        if known is not None and known.mask() is mask:
            lazy = LazyMask(known.placed, batch, device)
            if known.version == _version(mask) and (known.version is not None or _says_the_same(lazy, mask)):
                return lazy
        elif type(mask) is Tensor and mask.dim() == 4 and mask.numel() <= _SMALL:
            for placed in self._latest:
                lazy = LazyMask(placed, mask.shape[0], mask.device)
                if _says_the_same(lazy, mask):
                    return lazy
        return mask


class _Known(NamedTuple):
    mask: weakref.ref[Any]
    placed: Placed
    version: int | None


def _version(mask: Any) -> int | None:
    """How often a mask was written into; None where torch does not count (in inference mode)."""
    if not isinstance(mask, Tensor):
        return 0
    return None if mask.is_inference() else mask._version


def _says_the_same(lazy: LazyMask, mask: Any) -> bool:
    """Whether a mask hides exactly what a rule does, looked at a few rows at a time."""
    placed, q_len = lazy.placed, mask.shape[2]
    if (len(placed.q_positions), len(placed.kv_positions)) != mask.shape[2:]:
        return False
    rows = max(1, _SMALL // max(1, mask.shape[0] * mask.shape[3]))
    for first in range(0, q_len, rows):
        own = LazyMask(placed._replace(q_positions=placed.q_positions[first : first + rows]), len(mask), mask.device)
        said = own.written_out()
        allowed, added = mask_of_tensor(mask[:, :, first : first + rows])
        if added is not None or not (said.all() if allowed is None else torch.equal(said, allowed)):
            return False
    return True


def _tap() -> Callable[[], None]:
    """Wrap the two interfaces; returns a function that takes the wrappers off again."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  imported by the model

    get_interface, get_mask = AttentionInterface.get_interface, AttentionMaskInterface.__getitem__
    inherited = "__getitem__" not in vars(AttentionMaskInterface)

    def get_interface_tapped(self: Any, attn_implementation: Any, default: Any) -> Callable[..., Any]:
        name, function = str(attn_implementation), get_interface(self, attn_implementation, default)
        return _tapped(function, is_flash="flash" in name, is_foreign=_is_foreign(name, function))

    def get_mask_tapped(self: Any, name: str) -> Callable[..., Any]:
        return _tapped_mask(get_mask(self, name))

    # The classes, not their mappings: the names that models are set to, and all that depends on them, stay as they are.
    setattr(AttentionInterface, "get_interface", get_interface_tapped)  # noqa: B010
    setattr(AttentionMaskInterface, "__getitem__", get_mask_tapped)  # noqa: B010

    def restore() -> None:
        # Where somebody has put a function of theirs on top, ours stays below it; without listeners it does nothing.
        if AttentionInterface.get_interface is get_interface_tapped:
            setattr(AttentionInterface, "get_interface", get_interface)  # noqa: B010
        if AttentionMaskInterface.__getitem__ is not get_mask_tapped:
            return
        if inherited:
            delattr(AttentionMaskInterface, "__getitem__")
        else:
            setattr(AttentionMaskInterface, "__getitem__", get_mask)  # noqa: B010

    return restore


def _is_foreign(name: str, function: Callable[..., Any]) -> bool:
    """Whether an attention function is somebody else's, which may add a mask or terms to those of its arguments."""
    home = str(getattr(function, "__module__", None) or type(function).__module__)
    return not (name in _STANDARD or "flash" in name or home.startswith(("transformers.", "saccade.")))


def _tapped(function: Callable[..., Any], *, is_flash: bool, is_foreign: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        listeners = [listener for listener in _listeners if module in listener.names]
        if not listeners:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        ears = [Ear(listener.names[module], listener.valve) for listener in listeners]
        spoken = [ear.valve.spoken for ear in ears]
        with hearing_products(module, ears) if is_foreign else closed(ears), collected_matrices() as matrices:
            run = function if is_foreign else without_mode(function)
            out = run(module, query, key, value, attention_mask, *args, **kwargs)
        if matrices:  # a function of ours knows better than its arguments what it multiplied by
            _hand_out_all(ears, matrices)
            return out
        if [ear.valve.spoken for ear in ears] != spoken:  # of somebody else's function the product itself was recorded
            return out
        if args:
            reason = f"{type(module).__name__} gives {len(args)} further arguments without names"
            raise unsupported("a transformers model", [reason])
        facts = {name: fact for name, fact in kwargs.items() if name not in ("dropout", "output_attentions")}
        if getattr(key, "saccade_cache", None) is not None:
            reason = "its cache is one of ours, which is handed the new keys alone"
            raise unsupported("a transformers model", [reason], hint="transformers' own caches are heard")

        def making(listener: _Listener) -> Make:
            def make() -> AttentionMatrix:
                mask = listener.meaning_of(attention_mask, len(key), key.device)
                return AttentionCall.of(module, query, key, mask, facts, is_flash=is_flash).matrix()

            return make

        if is_foreign and not _is_product(making(listeners[0]), value, out, kwargs.get("dropout")):
            for ear in ears:
                ear.valve.note_unheard(ear.name, type(module).__name__)
            return out
        hand_out([(ear, making(listener)) for listener, ear in zip(listeners, ears, strict=True)])
        return out

    return tapped


def _is_product(make: Make, value: Tensor, out: Any, dropout_p: float | None) -> bool:
    """Whether a function returned the matrix of its arguments times the values; after dropout that cannot be seen."""
    if dropout_p or not (isinstance(out, tuple) and isinstance(out[0], Tensor)):
        return False
    with torch.no_grad():
        expected = make().matmul(value.detach()).transpose(1, 2)
    tolerance = max(1e-4, 16 * torch.finfo(expected.dtype).eps)
    is_alike = out[0].shape == expected.shape
    return is_alike and torch.allclose(out[0].to(expected.dtype), expected, rtol=tolerance, atol=tolerance)


def _hand_out_all(ears: list[Ear], matrices: list[Matrix]) -> None:
    """Hand out the matrices of one call; those after the first under the layer's name and ":1", and so on."""

    def making(matrix: Matrix) -> Make:
        return lambda: matrix

    for number, matrix in enumerate(matrices):
        named = [ear._replace(name=f"{ear.name}:{number}") if number else ear for ear in ears]
        hand_out([(ear, making(matrix)) for ear in named])


def _tapped_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        mask = without_mode(function)(*args, **kwargs)
        is_known = (type(mask) is Tensor and mask.dim() == 4) or isinstance(mask, BlockMask)
        if is_known and not args and not is_tracing():
            names = ("q_length", "kv_length", "q_offset", "kv_offset")
            sizes = {name: kwargs[name] for name in names if name in kwargs}
            placed = place(
                kwargs["mask_function"], kwargs.get("attention_mask"), one_by_one=kwargs.get("use_vmap", False), **sizes
            )
            for listener in _listeners:
                listener.learn(mask, placed)
        return mask

    return tapped
