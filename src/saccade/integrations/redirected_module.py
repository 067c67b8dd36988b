"""RedirectedModule: a third-party module that passes its attention calls to a handler."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from saccade.integrations.redirect_mode import Handler, Site, run_redirected
from saccade.integrations.swapped_class import SwappedClass, swap_class
from saccade.support.errors import unsupported
from saccade.support.torch_modes import outside_graph

CALLED_AS = "replace_attention"  # the name in error messages


class Redirection(NamedTuple):
    """The handler for a module's attention calls, and the module's name in the model."""

    handler: Handler
    name: str


class RedirectedModule(SwappedClass):
    """A module that runs its own code, but passes its attention calls to a handler."""

    keeps_name: ClassVar[bool] = True
    _saccade_redirection: Redirection

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        handler, name = self._saccade_redirection
        forward = super().forward
        if torch.compiler.is_compiling():
            return _outside_of_graph(self, args, kwargs)
        return run_redirected(handler, Site(name, self, args, kwargs), forward)


def redirect(module: nn.Module, handler: Handler, name: str) -> None:
    """Pass the attention calls in a module's own code to a handler, using `swap_class`.

    A few classes, such as those whose first base is `abc.ABC`, cannot be swapped. Their calls are attributed to the
    enclosing module.
    """
    try:
        swap_class(module, RedirectedModule)
    except TypeError:
        return
    vars(module)["_saccade_redirection"] = Redirection(handler, name)


def _outside_of_graph(module: RedirectedModule, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_exporting():
        reason = "its attention is redirected while it runs, which an exported program cannot contain"
        hint = "export the model before replace_attention"
        raise unsupported(type(module).__name__, [reason], hint=hint)
    return outside_graph(_run_eagerly, "saccade redirects its attention calls while it runs")(module, args, kwargs)


def _run_eagerly(module: RedirectedModule, args: Any, kwargs: Any) -> Any:
    _warn_once()
    return module.forward(*args, **kwargs)


_warned: list[bool] = []


def _warn_once() -> None:
    if not _warned:
        _warned.append(True)
        warnings.warn(
            "torch.compile: modules whose attention calls saccade redirects run eagerly",
            stacklevel=2,
        )
