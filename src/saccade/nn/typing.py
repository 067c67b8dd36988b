"""What all layers are to a type checker."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

__all__ = ["Layer"]


class Layer(nn.Module):
    """A module that makes a tensor of its inputs, by `forward`; torch tells type checkers that it may be anything."""

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...
