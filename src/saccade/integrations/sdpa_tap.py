"""The tap of everything that calls ``torch.nn.functional.scaled_dot_product_attention`` itself: timm, diffusers, …"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from saccade.attention_matrix import AttentionMatrix
from saccade.integrations.attention_call import mask_of_tensor
from saccade.integrations.tap import Valve, instead_of_forward, names_of
from saccade.integrations.transformers_tap import speaks_attention_interface
from saccade.masks import Causal, Dense, Mask

__all__ = ["tapped_products", "without_mode"]

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@contextmanager
def tapped_products(model: nn.Module, valve: Valve) -> Iterator[None]:
    """Hand out each fused product that a module of ``model`` asks torch for, under the module's name.

    A second product within the same call of a module is handed out under its name and ":1", and so on. torch's own
    layers, ours, and those of transformers that use its attention interface have taps of their own.
    """
    mode = _Mode(valve)
    with ExitStack() as stack:
        for module, name in names_of(model).items():
            if not _is_known(module):
                stack.enter_context(instead_of_forward(module, mode.within(module.forward, name)))
        yield


def without_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs as if no tap listened: torch's layers leave their fast path where a mode is on."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        stack = reversed(torch.overrides._get_current_function_mode_stack())
        # Only what is on top can be taken off. Below another's mode ours changes nothing more.
        listening = list(itertools.takewhile(lambda mode: isinstance(mode, _Mode), stack))
        for mode in listening:
            mode.__exit__(None, None, None)
        try:
            return function(*args, **kwargs)
        finally:
            for mode in reversed(listening):
                mode.__enter__()

    return run


class _Mode(TorchFunctionMode):
    """Hears every call of torch's fused product while a module of the model runs."""

    def __init__(self, valve: Valve):
        super().__init__()
        self._valve = valve
        self._running: list[list[Any]] = []  # names of the modules that run, the innermost last, and their products

    def within(self, forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The same forward pass, heard."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._running.append([name, 0])
            try:
                if any(mode is self for mode in torch.overrides._get_current_function_mode_stack()):
                    return forward(*args, **kwargs)
                with self:
                    return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and self._running:
            name, before = self._running[-1]
            self._running[-1][1] += 1
            given = dict(zip(_NAMES, args, strict=False)) | kwargs
            self._valve.hand_out(f"{name}:{before}" if before else name, lambda: _matrix(given))
        return out


def _matrix(given: dict[str, Any]) -> AttentionMatrix:
    """The matrix of a fused product; leading dimensions become batch items."""
    query, key = given["query"], given["key"]
    shape = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    heads = query.shape[-3] if query.dim() > 2 else 1
    query, key = (_four(x, shape) for x in (query, key))
    q_len, kv_len = query.shape[2], key.shape[2]
    if given.get("is_causal"):
        # torch's flag lets query 0 see key 0 and no more, whatever the lengths.
        rows, columns = range(q_len), range(kv_len)
        return AttentionMatrix(query, key, Causal(), scale=given.get("scale"), q_positions=rows, kv_positions=columns)
    mask = given.get("attn_mask")
    if mask is None:
        return AttentionMatrix(query, key, scale=given.get("scale"))
    mask = mask.expand(torch.broadcast_shapes(mask.shape, (q_len, kv_len))) if mask.dim() < 2 else mask
    if mask.dim() > 4 or (mask.dim() == 4 and len(shape) != 1):
        mask = mask.expand(*shape, heads, *mask.shape[-2:]).reshape(-1, heads, *mask.shape[-2:])
    mask = mask[(None,) * (4 - mask.dim())]
    allowed, bias = mask_of_tensor(mask)
    rule: Mask | None = None if allowed is None else Dense(allowed.expand(*allowed.shape[:3], kv_len))
    return AttentionMatrix(query, key, rule, bias=bias, scale=given.get("scale"))


def _four(x: Tensor, shape: torch.Size) -> Tensor:
    """``[..., heads, len, head_dim]`` with the leading dimensions as one."""
    x = x if x.dim() > 2 else x[None]
    return x.expand(*shape, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def _is_known(module: nn.Module) -> bool:
    home = type(module).__module__
    return (
        home.startswith(("torch.", "saccade."))
        or isinstance(module, torch.jit.ScriptModule)
        or speaks_attention_interface(module)
        or inspect.isbuiltin(module.forward)
    )
