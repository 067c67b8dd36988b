"""The tap of what no other tap hears: modules that are called attention, and compute it in operations of their own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from saccade.integrations.patch import listening
from saccade.integrations.tap import Ear, Valve, is_recomputed, names_of, refuse_compiled

__all__ = ["noting_unheard"]

_CALLED_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
# Parts of such a layer that attend to nothing.
_PARTS = re.compile(
    r"(output|norm|mlp|projection|bias|adapter(layer)?|structure|loss|mask|embeddings?)$", re.IGNORECASE
)


@contextmanager
def noting_unheard(model: nn.Module, valve: Valve) -> Iterator[None]:
    """Note each module whose class is called attention, and of which a whole call passed without anything handed out.

    Of modules within one another it is the innermost that is noted. Names are all there is to go by: what is called
    otherwise is not noticed, and what is called attention need not have a matrix.
    """
    with ExitStack() as stack:
        for module, name in names_of(model).items():
            if _may_attend(module):
                stack.enter_context(listening(module, _note, Ear(name, valve)))
        yield


def _may_attend(module: nn.Module) -> bool:
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule) or inspect.isbuiltin(module.forward):
        return False
    return bool(_CALLED_ATTENTION.search(name)) and not _PARTS.search(name)


def _note(
    module: nn.Module, forward: Callable[..., Any], ears: tuple[Ear, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    refuse_compiled()
    before = [ear.valve.spoken for ear in ears]
    out = forward(*args, **kwargs)
    if not is_recomputed():
        for ear, spoken in zip(ears, before, strict=True):
            if ear.valve.spoken == spoken:
                ear.valve.note_unheard(ear.name, type(module).__name__)
    return out
