"""Around: what masks have in common that are made of one other."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from saccade.masks.mask import Mask

__all__ = ["Around"]


class Around(Mask):
    """A mask made of one other: it tells items and heads apart, is a value and asks functions as that one does."""

    @property
    @abstractmethod
    def inner(self) -> Mask:
        """The other one."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    @property
    def is_value(self) -> bool:
        return self.inner.is_value

    @property
    def asks_functions(self) -> bool:
        return self.inner.asks_functions

    @property
    def is_fact_of_batch(self) -> bool:
        return self.inner.is_fact_of_batch

    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors()
