"""All taps of a model at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from saccade.integrations.listening import CHANGING
from saccade.integrations.saccade_tap import tapped_mechanisms
from saccade.integrations.sdpa_tap import tapped_products
from saccade.integrations.torch_tap import tapped_torch_layers
from saccade.integrations.transformers_tap import tapped_interface
from saccade.integrations.unheard_tap import noting_unheard
from saccade.integrations.valve import Sink, Valve

__all__ = ["tapped"]

_TAPS = (tapped_interface, tapped_products, tapped_torch_layers, tapped_mechanisms, noting_unheard)


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
