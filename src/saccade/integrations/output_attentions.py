"""Refuses ``output_attentions=True``, which not every model of transformers tells its attention function."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import nn

from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_tracing

_FLAG = "output_attentions"


def check_no_weights(module: nn.Module, facts: Mapping[str, Any]) -> None:
    """Refuse a call that was asked for weights, which a kernel does not build.

    Args:
        where: the user's function, for error messages.
        module: the attention layer that runs.
        facts: what its function is given by name.

    Raises:
        UnsupportedError: the layer, or the model around it, was given ``output_attentions=True``.
    """
    if not (facts.get(_FLAG) or _is_collected()):
        return
    reason = f"{_FLAG}=True asks for all weights, which are not built here"
    hint = "saccade.record(model) gives the matrices of every layer without building them"
    raise unsupported(type(module).__name__, [reason], hint=hint)


def _is_collected() -> bool:
    """Whether transformers is collecting the weights that layers return, as most models are asked to do."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    is_compiling = is_tracing()
    if is_compiling:  # a context variable cannot be traced; there, transformers keeps what it says here
        collected = getattr(collector, "global_var", None)
    else:
        collected = None if collector is None else collector.get()
    if collected is None:
        return not is_compiling and _is_read_by_a_caller(sys._getframe(1))
    return any(name.endswith("attentions") for name in collected)


def _is_read_by_a_caller(frame: FrameType | None) -> bool:
    """Whether a model further up, one that collects weights itself (PatchTST, Pix2Struct), has the flag in hand."""
    while frame is not None:
        is_theirs = str(frame.f_globals.get("__name__")).startswith("transformers.")
        if is_theirs and _FLAG in frame.f_code.co_varnames and frame.f_locals.get(_FLAG):
            return True
        frame = frame.f_back
    return False
