"""Capture every attention call of a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from saccade.integrations.capture_context import Callback, Capture, is_recomputed, names_of, refuse_compiled
from saccade.integrations.forward_proxy import PATCH_LOCK, CapturedCall, capture_forwards
from saccade.integrations.recurrences_capture import capture_recurrences, is_recurrence
from saccade.integrations.saccade_capture import capture_mechanisms
from saccade.integrations.sdpa_capture import capture_products
from saccade.integrations.torch_capture import capture_torch_layers
from saccade.integrations.transformers_capture import capture_interface

_CALLED_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
# Suffixes of parts of an attention layer that do not attend.
_PARTS = re.compile(
    r"(output|norm|mlp|projection|bias|adapter(layer)?|structure|loss|mask|embeddings?)$", re.IGNORECASE
)


@contextmanager
def capture_all(model: nn.Module, callback: Callback) -> Iterator[Capture]:
    """Pass every attention matrix of a model to ``callback`` while the model runs on its own kernels.

    Args:
        model: any torch model.
        callback: called as ``callback(name, make)`` after a layer's own kernel ran; ``make()`` returns the matrix. Its
            tensors are those of the model and may change after the call.

    Yields:
        The capture; its ``not_recorded`` names layers that seem to attend and cannot be recorded.

    Calls that begin and end within the block are captured, in any thread. Several captures of one model may overlap and
    end in any order.

    Cost: the callback, and for ``nn.MultiheadAttention`` a second projection of queries and keys.
    """
    capture = Capture(callback)
    with ExitStack() as stack:
        with PATCH_LOCK:  # proxies on one module are added and removed in the same order
            for capture_part in _CAPTURES:
                stack.enter_context(capture_part(model, capture))
        try:
            yield capture
        finally:
            capture.is_active = False
            with PATCH_LOCK:
                stack.close()


def _note_not_recorded(model: nn.Module, capture: Capture) -> AbstractContextManager[None]:
    """Note each module whose class is named attention and that ran a whole call of which no matrix was captured.

    The innermost of nested modules is noted. The class name is the only evidence: other names are missed, and a class
    named attention need not have a matrix.
    """
    modules = [(module, name, _note) for module, name in names_of(model).items() if _may_attend(module)]
    return capture_forwards(modules, capture)


def _may_attend(module: nn.Module) -> bool:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule) or inspect.isbuiltin(module.forward):
        return False
    is_named_attention = bool(_CALLED_ATTENTION.search(name)) and not _PARTS.search(name)
    return is_named_attention or is_recurrence(module)


def _note(call: CapturedCall) -> Any:
    refuse_compiled()
    before = [listener.capture.num_captured for listener in call.listeners]
    out = call.run()
    if not is_recomputed():
        for listener, num_captured in zip(call.listeners, before, strict=True):
            if listener.capture.num_captured == num_captured:
                listener.capture.note_not_recorded(listener.name, type(call.module).__name__)
    return out


# The last one goes on top: it notes the calls that no other has captured.
_CAPTURES = (
    capture_interface,
    capture_products,
    capture_torch_layers,
    capture_mechanisms,
    capture_recurrences,
    _note_not_recorded,
)
