"""Activations by the names that model configurations use."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

__all__ = ["ACTIVATIONS"]

_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
