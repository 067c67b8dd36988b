"""Run a model in true float64, even where the model's code converts to float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from saccade.support.language import Message
from saccade.text import visible

Model = TypeVar("Model", bound=Callable[..., Any])


class TrueFloat64(TorchFunctionMode):
    """A mode in which torch's functions return float64 where the code requests float32.

    ``model.double()`` alone does not make a model compute in float64, because the norms, softmax and rotary angles of
    many models convert to float32 explicitly. The mode affects calls of torch's functions, but not compiled graphs or
    fused kernels.

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
        return func(*map(_to_float64, args), **{name: _to_float64(value) for name, value in (kwargs or {}).items()})


def float64_copy(model: Model, run: Callable[[Model], Tensor]) -> tuple[Model | None, str]:
    """Return a float64 copy of a model and "". If the copy does not run in `TrueFloat64`, return None and the reason.

    Args:
        model: the model, which is left unchanged. A function has no dtype, so the function itself is returned.
        run: a function that runs the copy and returns its outputs.

    Cost: memory for a copy of the model, twice as large if the model is in float32, and one run.
    """
    try:
        wide = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
        if hasattr(wide, "set_experts_implementation"):
            wide.set_experts_implementation("eager")  # grouped matrix products do not support float64
        with TrueFloat64(), torch.no_grad():
            out = run(wide)
    except Exception as error:  # a model may raise any error; the caller then continues in the model's dtype
        return None, describe_error(error)
    return (wide, "") if out.dtype is torch.float64 else (None, Message("its outputs stay {dtype}", dtype=out.dtype))


def describe_error(error: Exception) -> str:
    """Return the type of an exception from a run and the first line of its message, safe to print."""
    first = str(error).strip().partition("\n")[0]
    return visible(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def _to_float64(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
