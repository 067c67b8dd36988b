"""Capture attention that modules compute in their own code, with torch's functions or with separate operations."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.engine.inputs import AttentionInputs
from saccade.fusion.observe import ObserveAttention
from saccade.fusion.recovered_call import AttentionCall, Output
from saccade.integrations import redirect_mode
from saccade.integrations.call_output import AnyOutput, CallOutput, DenseWeights
from saccade.integrations.capture_context import (
    Capture,
    Listener,
    emit_all,
    names_of,
    refuse_compiled,
)
from saccade.integrations.forward_proxy import CapturedCall, Running, capture_forwards
from saccade.integrations.mha_function import function_matrix, function_output
from saccade.integrations.other_packages import VisibleFunction, visible_functions
from saccade.integrations.redirect_mode import beneath_redirection, is_engine
from saccade.integrations.redirected_call import Call, Redirected, placed_before_free_slots
from saccade.integrations.sdpa_matrix import sdpa_arguments, sdpa_matrix, sdpa_output
from saccade.integrations.transformers_call import uses_attention_interface
from saccade.matrix import DenseMatrix, Impl, matrix_from_inputs
from saccade.matrix.functions import OBSERVERS
from saccade.support.torch_modes import is_mapped

_NAMED = frozenset({"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"})


@contextmanager
def capture_own_code(model: nn.Module, capture: Capture) -> Iterator[None]:
    """Capture attention that modules of ``model`` compute in their own code, under the module's name.

    This covers calls to ``F.scaled_dot_product_attention``, ``F.multi_head_attention_forward``, FlexAttention,
    flash-attn's and xformers' functions, `saccade.attention` and `saccade.attention_with_lse`; weights computed by
    matmul and softmax and multiplied by values; and other dense weights, if they come from a softmax. If a module
    computes attention several times in one forward pass, the second call is named after the module with ":1" appended,
    the third with ":2", and so on. If a module multiplies softmax results whose layout is unknown, it is noted as not
    recorded. Layers of torch and of this library are captured elsewhere.
    """
    modules = [(module, name, _capture_calls) for module, name in names_of(model).items() if not _is_known(module)]
    with capture_forwards(modules, capture), visible_functions(model):
        on_attention = functools.partial(_capture_attention, capture)
        on_redirected = functools.partial(_capture_redirected, capture)
        OBSERVERS.append(on_attention)
        redirect_mode.OBSERVERS.append(on_redirected)
        try:
            yield
        finally:
            OBSERVERS.remove(on_attention)
            redirect_mode.OBSERVERS.remove(on_redirected)


def without_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to run without the capture mode, because torch's layers skip their fast path under a mode."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        stack = reversed(torch.overrides._get_current_function_mode_stack())
        # Only the topmost modes can be removed. If another library's mode is on top, the fast path is off anyway.
        modes = list(itertools.takewhile(lambda mode: isinstance(mode, CaptureMode), stack))
        for mode in modes:
            mode.__exit__(None, None, None)
        try:
            return function(*args, **kwargs)
        finally:
            for mode in reversed(modes):
                mode.__enter__()

    return run


@dataclass
class _Caller:
    """A running module whose code may compute attention, and one of its listeners.

    Attributes:
        listener: the capture and the module's name in it.
        kind: the name of the module's class.
        calls: number of attention calls so far.
    """

    listener: Listener
    kind: str
    calls: int = 0


_running = Running()


class CaptureMode(ObserveAttention):
    """A torch function mode that captures attention in a recorded module's own code; the module runs unchanged."""

    def __init__(self) -> None:
        super().__init__(lambda call: None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
                refuse_compiled()
            return func(*args, **kwargs)
        if is_engine(sys._getframe(1)):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            out = func(*args, **kwargs)
            arguments = sdpa_arguments(args, kwargs)
            _emit(lambda: sdpa_matrix(arguments), sdpa_output(arguments, out))
            return out
        if func is F.multi_head_attention_forward:
            outputs = func(*args, **kwargs)
            _emit(lambda: function_matrix(args, kwargs), function_output(args, kwargs, outputs[0]))
            return outputs
        if type(func) is VisibleFunction:
            out = func(*args, **kwargs)
            arguments = func.arguments(args, kwargs)
            if func.other.unsupported(arguments):
                self.report_unknown()
            else:
                _emit(lambda: func.other.call(arguments).matrix(None), func.other.output(arguments, out))
            return out
        return super().__torch_function__(func, types, args, kwargs)

    def report_call(self, call: AttentionCall, output: Output, out: Tensor) -> None:
        """Capture attention that the module has computed with separate operations."""
        made = CallOutput(out, lambda grad: output.to_heads(grad, call), lambda: call.value, call.dropout_p)
        _emit(call.matrix, made)

    def report_weights(self, weights: Tensor, arrange: Callable[[Tensor], Tensor]) -> None:
        """Capture the module's dense attention weights, just before it multiplies them by values."""
        if is_mapped(weights):
            self.report_unknown()  # vmap hides the values
            return
        _emit(lambda: DenseMatrix(arrange(weights.detach())), DenseWeights(weights, arrange))

    def report_unknown(self) -> None:
        """Note that the module computed attention that cannot be converted, such as weights of unknown layout."""
        if not _is_called_by_engine(sys._getframe(1)):
            for caller in _innermost_callers():
                caller.listener.capture.note_not_recorded(caller.listener.name, caller.kind)


@contextmanager
def capture_code_of(module: nn.Module, listeners: Iterable[Listener]) -> Iterator[None]:
    """Capture attention that is computed within the block, and attribute it to the given module."""
    is_on = any(isinstance(mode, CaptureMode) for mode in torch.overrides._get_current_function_mode_stack())
    kind = type(module).__name__
    callers = [_Caller(listener, kind) for listener in listeners]
    with _running.within(*callers), nullcontext() if is_on else beneath_redirection(CaptureMode()):
        yield


def _emit(make: Any, output: AnyOutput | None = None) -> None:
    """Emit an attention call to the innermost running module's listeners, unless a saccade kernel made the call."""
    if not _is_called_by_engine(sys._getframe(1)):
        emit_all([(listener, lambda: placed_before_free_slots(make())) for listener in _listeners()], output)


def _capture_attention(capture: Capture, inputs: AttentionInputs, impl: Impl) -> None:
    """Capture a call to `saccade.attention` by a third-party module; this library's layers are captured elsewhere."""
    if not _called_by_library(sys._getframe(1)):
        emit_all([(listener, lambda: matrix_from_inputs(inputs, impl)) for listener in _listeners(capture)])


def _capture_redirected(capture: Capture, redirected: Redirected, call: Call) -> None:
    """Capture an attention call in a module's own code that `saccade.replace_attention` has computed."""
    output = CallOutput(redirected.out, lambda grad: grad, lambda: redirected.value, call.dropout_p)
    emit_all([(listener, lambda: redirected.matrix) for listener in _listeners(capture)], output)


def _called_by_library(frame: FrameType | None) -> bool:
    """Return whether the caller of `saccade.attention` is a module of this library."""
    inside = ("saccade.matrix.functions", "saccade.support.argument_hints", __name__)
    while frame is not None and frame.f_globals.get("__name__") in inside:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("saccade.")


def _capture_calls(call: CapturedCall) -> Any:
    with capture_code_of(call.module, call.listeners):
        return call.run()


def _is_called_by_engine(frame: FrameType | None) -> bool:
    """Return whether a saccade kernel is among a torch call's callers; its matrix is already captured."""
    while frame is not None:
        if is_engine(frame):
            return True
        frame = frame.f_back
    return False


def _innermost_callers() -> list[_Caller]:
    """Return, for each capture, the innermost running module whose code may compute attention."""
    return list({caller.listener.capture: caller for caller in _running.stack}.values())


def _listeners(only: Capture | None = None) -> list[Listener]:
    """Return a listener for each capture (or only the given one), named after the innermost running module."""
    listeners = []
    for caller in _innermost_callers():
        name, capture = caller.listener
        if only in (None, capture):
            listeners.append(Listener(f"{name}:{caller.calls}" if caller.calls else name, capture))
            caller.calls += 1
    return listeners


def _is_known(module: nn.Module) -> bool:
    return (
        type(module).__module__.startswith(("torch.", "saccade."))
        or isinstance(module, torch.jit.ScriptModule)
        or inspect.isbuiltin(module.forward)
        or (uses_attention_interface(module) and not _may_attend_itself(module))
    )


def _may_attend_itself(module: nn.Module) -> bool:
    """Return whether a module's own code calls a softmax or torch's attention, not only transformers' interface."""
    bases = itertools.takewhile(lambda base: base is not nn.Module, type(module).__mro__)
    functions = (
        inspect.unwrap(function) for base in bases for function in vars(base).values() if inspect.isfunction(function)
    )
    has_softmax = any(isinstance(part, nn.Softmax) for part in module.children())
    return has_softmax or any(
        not _NAMED.isdisjoint(function.__code__.co_names) for function in filter(inspect.isfunction, functions)
    )
