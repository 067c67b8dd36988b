"""Run matrix methods outside of compiled graphs, because the number of blocks in their loops depends on the inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_recorded

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(method: F) -> F:
    """Decorate a method of a matrix so that a compiled program interrupts its graph to run the method in Python.

    With ``fullgraph=True``, the compiler raises an error that contains the reason. An exported program cannot call
    Python, so the method raises an `UnsupportedError` during export.
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (torch.compiler.is_compiling() or is_recorded()):
            return method(self, *args, **kwargs)
        reason = f"{method.__name__}() of a matrix runs block by block, which cannot be one operation of a graph"
        if not torch.compiler.is_dynamo_compiling():
            hint = "export the products A @ value, and call other methods of the matrix outside the exported program"
            raise unsupported("torch.export", [reason], hint=hint)
        torch._dynamo.graph_break(msg=f"saccade: {reason}")
        return torch.compiler.disable(_run_eagerly)(method, self, args, kwargs)

    return cast("F", run)


def _run_eagerly(method: Callable[..., Any], matrix: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return method(matrix.after_tracing(), *args, **kwargs)
