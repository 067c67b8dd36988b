"""float64 that is one: without the parts of a model that round to float32 inside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from saccade.text import visible

Model = TypeVar("Model", bound=Callable[..., Any])


class TrueFloat64(TorchFunctionMode):
    """Within it, whoever asks torch for float32 gets float64.

    ``model.double()`` does not make a model compute in float64: norms, softmax and rotary angles of many models ask for
    float32 by name. It reaches calls of torch's functions, not what runs in a compiled graph or in a fused kernel.

    Example:
        >>> x = torch.ones(2, dtype=torch.float64)
        >>> with TrueFloat64():
        ...     print(x.float().dtype, x.to(torch.float32).dtype)
        torch.float64 torch.float64
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_widened, args), **{name: _widened(given) for name, given in (kwargs or {}).items()})


def float64_copy(model: Model, run: Callable[[Model], Tensor]) -> tuple[Model | None, str]:
    """A copy of a model in float64, if the copy runs in `TrueFloat64`; else None and the reason.

    Args:
        model: left as it is; a function, which has no dtype, is its own copy.
        run: what the copy is tried with; returns what it computes.

    Cost: a copy of the model, twice as large where it is in float32, and one run.
    """
    try:
        wide = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
        if hasattr(wide, "set_experts_implementation"):
            wide.set_experts_implementation("eager")  # grouped products of matrices know no float64
        with TrueFloat64(), torch.no_grad():
            out = run(wide)
    except Exception as error:  # whatever a model may raise; the caller goes on in the model's own dtype
        return None, said(error)
    return (wide, "") if out.dtype is torch.float64 else (None, f"its outputs stay {out.dtype}")


def said(error: Exception) -> str:
    """The type of an exception and its first line, safe to show."""
    first = str(error).strip().partition("\n")[0]
    return visible(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def _widened(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given
