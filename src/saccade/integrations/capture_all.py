"""All taps of a model at once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from saccade.integrations.capture_context import Sink, Valve, is_recomputed, names_of, refuse_compiled
from saccade.integrations.forward_proxy import CHANGING, HeardCall, listening
from saccade.integrations.recurrences_capture import is_recurrence, tapped_recurrences
from saccade.integrations.saccade_capture import tapped_mechanisms
from saccade.integrations.sdpa_capture import tapped_products
from saccade.integrations.torch_capture import tapped_torch_layers
from saccade.integrations.transformers_capture import tapped_interface

_CALLED_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
# Parts of such a layer that attend to nothing.
_PARTS = re.compile(
    r"(output|norm|mlp|projection|bias|adapter(layer)?|structure|loss|mask|embeddings?)$", re.IGNORECASE
)


@contextmanager
def tapped(model: nn.Module, sink: Sink) -> Iterator[Valve]:
    """Hand every attention matrix of a model to ``sink`` while the model runs on its own kernels.

    Args:
        model: any torch model.
        sink: called as ``sink(name, make)`` after a layer's own kernel ran; ``make()`` gives the matrix, whose tensors
            are those of the model and may change after the call.

    Yields:
        The valve through which all of it flows; its ``unheard`` are layers that seem to attend and cannot be heard.

    Heard is what begins and ends meanwhile, in whichever thread. Several may listen to one model, and end in any order.

    Cost: none beside what the sink does, and projecting queries and keys once more for ``nn.MultiheadAttention``.
    """
    valve = Valve(sink)
    with ExitStack() as stack:
        with CHANGING:  # posts of several kinds on one module go up and down in one order
            for tap in _TAPS:
                stack.enter_context(tap(model, valve))
        try:
            yield valve
        finally:
            valve.is_open = False
            with CHANGING:
                stack.close()


def _noting_unheard(model: nn.Module, valve: Valve) -> AbstractContextManager[None]:
    """Note each module whose class is called attention and that ran a whole call without a matrix being handed out.

    Of modules within one another it is the innermost that is noted. Names are all there is to go by: what is called
    otherwise is not noticed, and what is called attention need not have a matrix.
    """
    return listening([(module, name, _note) for module, name in names_of(model).items() if _may_attend(module)], valve)


def _may_attend(module: nn.Module) -> bool:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule) or inspect.isbuiltin(module.forward):
        return False
    is_called_so = bool(_CALLED_ATTENTION.search(name)) and not _PARTS.search(name)
    return is_called_so or is_recurrence(module)


def _note(call: HeardCall) -> Any:
    refuse_compiled()
    before = [ear.valve.spoken for ear in call.ears]
    out = call.run()
    if not is_recomputed():
        for ear, spoken in zip(call.ears, before, strict=True):
            if ear.valve.spoken == spoken:
                ear.valve.note_unheard(ear.name, type(call.module).__name__)
    return out


# Posts of the last one stand on top: what it notes is what no other has handed out.
_TAPS = (
    tapped_interface,
    tapped_products,
    tapped_torch_layers,
    tapped_mechanisms,
    tapped_recurrences,
    _noting_unheard,
)
