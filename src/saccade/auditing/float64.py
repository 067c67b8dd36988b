"""True float64: run a model without the parts that convert to float32 inside."""

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
    """A mode in which torch's functions return float64 if they are asked for float32.

    ``model.double()`` does not make a model compute in float64: norms, softmax and rotary angles of many models
    convert to float32 by name. The mode reaches calls of torch's functions, not compiled graphs or fused kernels.

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
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def float64_copy(model: Model, run: Callable[[Model], Tensor]) -> tuple[Model | None, str]:
    """Return a copy of a model in float64, if the copy runs in `TrueFloat64`; else None and the reason.

    Args:
        model: left unchanged; a function, which has no dtype, is returned itself.
        run: runs the copy, and returns its outputs.

    Cost: a copy of the model, twice as large if it is in float32, and one run.
    """
    try:
        wide = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
        if hasattr(wide, "set_experts_implementation"):
            wide.set_experts_implementation("eager")  # grouped matrix products do not support float64
        with TrueFloat64(), torch.no_grad():
            out = run(wide)
    except Exception as error:  # a model may raise anything; the caller goes on in the model's dtype
        return None, describe_error(error)
    return (wide, "") if out.dtype is torch.float64 else (None, f"its outputs stay {out.dtype}")


def describe_error(error: Exception) -> str:
    """Return the type of an exception and its first line, safe to print."""
    first = str(error).strip().partition("\n")[0]
    return visible(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
