"""Find the attention functions of FlexAttention, flash-attn and xformers in a model's code, and convert their calls."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saccade.integrations.call_output import CallOutput
from saccade.integrations.redirected_call import Attend, Call
from saccade.integrations.tensor_masks import both, joined, rule_of_tensor
from saccade.masks import Causal, Full, Mask, Predicate, Window
from saccade.matrix import AttentionMatrix

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class OtherFunction:
    """An attention function of a third-party package, with functions that convert its calls to attention matrices.

    Attributes:
        heads_first: whether the layout is ``[batch, heads, len, width]`` instead of ``[batch, len, heads, width]``.
        unsupported: returns the reason why a call cannot be converted, or "" if it can.
        matrix: returns the attention matrix of a call, given its arguments, queries, keys and an additional mask.
        dropout: name of the dropout probability parameter; "" if there is none.
    """

    heads_first: bool
    unsupported: Callable[[Arguments], str]
    matrix: Callable[[Arguments, Tensor, Tensor, Mask | None], AttentionMatrix]
    dropout: str = ""

    def call(self, arguments: Arguments) -> Call:
        """Translate the arguments of a call to this function into an attention `Call`."""
        query, key, value = (self._with_heads_first(arguments[name]) for name in _names(arguments))
        dropout_p = float(arguments[self.dropout]) if self.dropout else 0.0
        return Call(lambda rule: self.matrix(arguments, query, key, rule), value, query.shape[2], dropout_p)

    def run(self, arguments: Arguments, attend: Attend) -> Tensor | None:
        """Evaluate a call to this function using ``attend``; return None if ``attend`` returns None."""
        redirected = attend(self.call(arguments))
        if redirected is None:
            return None
        out = redirected.out if self.heads_first else redirected.out.transpose(1, 2)
        return out if arguments[_names(arguments)[0]].dim() == 4 else out.squeeze(2)

    def output(self, arguments: Arguments, out: Tensor) -> CallOutput:
        """Wrap the output of a call to this function as a `CallOutput`."""
        call = self.call(arguments)
        return CallOutput(out, self._with_heads_first, lambda: call.value, call.dropout_p)

    def _with_heads_first(self, x: Tensor) -> Tensor:
        x = x if x.dim() == 4 else x.unsqueeze(2)  # xformers accepts tensors without heads
        return x if self.heads_first else x.transpose(1, 2)


def _names(arguments: Arguments) -> tuple[str, str, str]:
    return ("query", "key", "value") if "query" in arguments else ("q", "k", "v")


def _flex_unsupported(arguments: Arguments) -> str:
    returns_more = arguments.get("return_lse") or arguments.get("return_aux") is not None
    return "it also returns the lse" if returns_more else ""


def _flex_matrix(arguments: Arguments, query: Tensor, key: Tensor, rule: Mask | None) -> AttentionMatrix:
    block_mask = arguments["block_mask"]
    call_rule = None if block_mask is None else Predicate(block_mask.mask_mod)
    positions = _from_first(query, key)
    mask, scale = joined(call_rule, rule), arguments["scale"]
    return AttentionMatrix(query, key, mask, score=arguments["score_mod"], scale=scale, **positions)


def _flash_unsupported(arguments: Arguments) -> str:
    if arguments.get("return_attn_probs"):
        return "it also returns its weights"
    return "its alibi_slopes are not converted" if arguments.get("alibi_slopes") is not None else ""


def _flash_matrix(arguments: Arguments, query: Tensor, key: Tensor, rule: Mask | None) -> AttentionMatrix:
    left, right = arguments["window_size"]
    call_rule: Mask = Causal() if arguments["causal"] else Full()
    if left >= 0 or right >= 0:
        call_rule = both(call_rule, Window(left if left >= 0 else None, right if right >= 0 else None))
    scale, softcap = arguments["softmax_scale"], arguments.get("softcap") or None
    return AttentionMatrix(query, key, joined(call_rule, rule), scale=scale, softcap=softcap)


def _xformers_unsupported(arguments: Arguments) -> str:
    bias = arguments["attn_bias"]
    if bias is None or type(bias) is Tensor or type(bias).__name__ == "LowerTriangularMask":
        return ""
    return f"its attn_bias is a {type(bias).__name__}"


def _xformers_matrix(arguments: Arguments, query: Tensor, key: Tensor, rule: Mask | None) -> AttentionMatrix:
    bias, scale = arguments["attn_bias"], arguments["scale"]
    if isinstance(bias, Tensor) and type(bias) is Tensor:
        call_rule, added = rule_of_tensor(bias if bias.dim() == 4 else bias.unsqueeze(1), key.shape[2])
        return AttentionMatrix(query, key, joined(call_rule, rule), bias=added, scale=scale)
    if bias is None:
        return AttentionMatrix(query, key, rule, scale=scale)
    positions = _from_first(query, key)
    return AttentionMatrix(query, key, joined(Causal(), rule), scale=scale, **positions)


def _from_first(query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return the position arguments for a function that aligns the first query with the first key."""
    return {"q_positions": range(query.shape[2]), "kv_positions": range(key.shape[2])}


# Keyed by package and function name.
_FUNCTIONS = {
    ("torch", "flex_attention"): OtherFunction(True, _flex_unsupported, _flex_matrix),
    ("flash_attn", "flash_attn_func"): OtherFunction(False, _flash_unsupported, _flash_matrix, "dropout_p"),
    ("xformers", "memory_efficient_attention"): OtherFunction(False, _xformers_unsupported, _xformers_matrix, "p"),
}
_OTHERS = ("flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func")
_UNKNOWN = OtherFunction(False, lambda arguments: "its packed tensors are not converted", _flash_matrix)


def _other_function(function: Any) -> OtherFunction | None:
    """Return the `OtherFunction` for another package's attention function, or None for any other object."""
    if not inspect.isfunction(function):
        return None
    name, package = function.__name__, str(function.__module__).partition(".")[0]
    if package == "flash_attn" and name in _OTHERS:
        return _UNKNOWN
    return _FUNCTIONS.get((package, name))


class VisibleFunction:
    """A wrapper that makes another package's attention function visible to torch function modes.

    Args:
        function: the original function.
        original: the callable that the model's code refers to, either ``function`` or its compiled form.
        other: the `OtherFunction` that converts calls to attention matrices.

    Attributes:
        users: number of recordings and models that use the wrapper.
    """

    def __init__(self, function: Any, original: Any, other: OtherFunction):
        functools.update_wrapper(self, function)
        self.original, self.other, self.users = original, other, 1
        self._signature = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled() and not torch.compiler.is_compiling():
            return torch.overrides.handle_torch_function(self, (), *args, **kwargs)
        return self.original(*args, **kwargs)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, including defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


_lock = threading.Lock()


@contextmanager
def visible_functions(model: nn.Module) -> Iterator[None]:
    """Make calls to other packages' attention functions visible to torch function modes within the block.

    The functions are replaced in the global namespaces of the source files that define the modules. A compiled function
    runs uncompiled while a mode is active.
    """
    with ExitStack() as stack:
        for names in _namespaces(model):
            for name in [*names]:
                if _make_visible(names, name):
                    stack.callback(_restore_original, names, name)
        yield


def make_visible(model: nn.Module) -> None:
    """Make calls to other packages' attention functions visible, like `visible_functions`, but permanently."""
    for names in _namespaces(model):
        for name in [*names]:
            _make_visible(names, name)


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """Return the global namespaces of the files that define a model's classes, except torch's and saccade's."""
    files = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    names = [name for name in files if not name.startswith(("torch.", "saccade.", "builtins"))]
    return [vars(sys.modules[name]) for name in names if name in sys.modules]


def _make_visible(names: dict[str, Any], name: str) -> bool:
    """Wrap a global variable if it is another package's attention function, and return whether it is one."""
    with _lock:
        value = names[name]
        if isinstance(value, VisibleFunction):
            value.users += 1
            return True
        function = vars(value).get("_torchdynamo_orig_callable", value) if inspect.isfunction(value) else value
        other = _other_function(function)
        if other is not None:
            names[name] = VisibleFunction(function, value, other)
        return other is not None


def _restore_original(names: dict[str, Any], name: str) -> None:
    with _lock:
        visible = names.get(name)
        if isinstance(visible, VisibleFunction):
            visible.users -= 1
            if not visible.users:
                names[name] = visible.original
