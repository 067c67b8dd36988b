"""capture_all: pass every attention matrix of a model to a callback."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from saccade.integrations.capture_context import Callback, Capture, names_of, refuse_compiled
from saccade.integrations.capture_mode import capture_own_code
from saccade.integrations.forward_proxy import PATCH_LOCK, CapturedCall, capture_forwards
from saccade.integrations.recurrences_capture import capture_recurrences, is_recurrence
from saccade.integrations.saccade_capture import capture_mechanisms
from saccade.integrations.scripted_code import is_program_with_attention, scripted_softmax_in
from saccade.integrations.torch_capture import capture_torch_layers
from saccade.integrations.transformers_capture import capture_interface
from saccade.support.torch_modes import in_backward

_CALLED_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
# Class-name suffixes of parts of attention layers that do not compute attention.
_PARTS = re.compile(
    r"(output|norm|mlp|projection|bias|adapter(layer)?|structure|loss|mask|embeddings?)$", re.IGNORECASE
)


@contextmanager
def capture_all(model: nn.Module, callback: Callback) -> Iterator[Capture]:
    """Pass each of a model's attention matrices to ``callback`` while the model runs on its own kernels.

    Args:
        model: any torch model.
        callback: called as ``callback(name, captured)`` after a layer's own kernel has run; ``captured()`` returns the
            matrix. It references tensors of the model that may change after the call.

    Yields:
        The capture. Its ``not_recorded`` lists layers that seem to compute attention but cannot be recorded.

    Calls that begin and end within the block are captured, in every thread. Several captures of a model may overlap and
    end in any order.

    Cost: the callback, plus a second projection of queries and keys for ``nn.MultiheadAttention``.
    """
    capture = Capture(callback)
    with ExitStack() as stack:
        with PATCH_LOCK:  # so that the proxies on a module are added and removed in the same order
            for capture_part in _CAPTURES:
                stack.enter_context(capture_part(model, capture))
        try:
            yield capture
        finally:
            capture.is_active = False
            with PATCH_LOCK:
                stack.close()


def _note_not_recorded(model: nn.Module, capture: Capture) -> AbstractContextManager[None]:
    """Note each recurrence and each module with "attention" in its class name that ran without a captured matrix.

    If such modules are nested, only the innermost is noted. For attention, the class name is the only evidence, except
    in scripted code: modules with other names are missed, and a class with "attention" in its name need not compute an
    attention matrix.
    """
    names = names_of(model)
    modules = [(module, name, _note) for module, name in names.items() if _may_attend(module)]
    for module, name in names.items():
        programs = {names[part]: part for part in module.children() if _is_script_with_attention(part)}
        if programs and not isinstance(module, torch.jit.ScriptModule):
            modules.append((module, name, functools.partial(_note_programs, programs)))
    return capture_forwards(modules, capture)


def _is_script_with_attention(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and is_program_with_attention(module)


def _note_programs(programs: dict[str, Any], call: CapturedCall) -> Any:
    """Note the scripted modules that a module contains after it has run; they have no hooks."""
    out = call.run()
    for listener in call.listeners:
        for name, program in programs.items():
            listener.capture.note_not_recorded(name, str(program.original_name))
    return out


def _may_attend(module: nn.Module) -> bool:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule) or inspect.isbuiltin(module.forward):
        return False
    is_named_attention = bool(_CALLED_ATTENTION.search(name)) and not _PARTS.search(name)
    return is_named_attention or is_recurrence(module) or bool(scripted_softmax_in(module))


def _note(call: CapturedCall) -> Any:
    refuse_compiled()
    before = [listener.capture.num_captured for listener in call.listeners]
    out = call.run()
    if not in_backward():
        for listener, num_captured in zip(call.listeners, before, strict=True):
            if listener.capture.num_captured == num_captured:
                listener.capture.note_not_recorded(listener.name, type(call.module).__name__)
    return out


# The last entry is the outermost; it notes the calls that the others did not capture.
_CAPTURES = (
    capture_interface,
    capture_own_code,
    capture_torch_layers,
    capture_mechanisms,
    capture_recurrences,
    _note_not_recorded,
)
