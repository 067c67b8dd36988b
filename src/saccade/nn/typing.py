"""Layer: the base of all layers, for type checkers."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

__all__ = ["Layer"]


class Layer(nn.Module):
    """A module whose call returns a tensor; to type checkers a call of ``nn.Module`` may return anything."""

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...
