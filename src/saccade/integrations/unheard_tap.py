"""Notes modules that are called attention and that no tap hears: they compute it in operations of their own."""

from __future__ import annotations

import inspect
import re
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from saccade.integrations.listening import HeardCall, listening
from saccade.integrations.valve import Valve, is_recomputed, names_of, refuse_compiled

__all__ = ["noting_unheard"]

_CALLED_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
# Parts of such a layer that attend to nothing.
_PARTS = re.compile(
    r"(output|norm|mlp|projection|bias|adapter(layer)?|structure|loss|mask|embeddings?)$", re.IGNORECASE
)


def noting_unheard(model: nn.Module, valve: Valve) -> AbstractContextManager[None]:
    """Note each module whose class is called attention and that ran a whole call without a matrix being handed out.

    Of modules within one another it is the innermost that is noted. Names are all there is to go by: what is called
    otherwise is not noticed, and what is called attention need not have a matrix.
    """
    return listening([(module, name, _note) for module, name in names_of(model).items() if _may_attend(module)], valve)


def _may_attend(module: nn.Module) -> bool:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule) or inspect.isbuiltin(module.forward):
        return False
    return bool(_CALLED_ATTENTION.search(name)) and not _PARTS.search(name)


def _note(call: HeardCall) -> Any:
    refuse_compiled()
    before = [ear.valve.spoken for ear in call.ears]
    out = call.run()
    if not is_recomputed():
        for ear, spoken in zip(call.ears, before, strict=True):
            if ear.valve.spoken == spoken:
                ear.valve.note_unheard(ear.name, type(call.module).__name__)
    return out
