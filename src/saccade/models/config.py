"""Config: what the configurations of all models share. The annotation of a field says what it must be."""

from __future__ import annotations

import dataclasses
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from saccade.arguments import flag, instance, integer, number, one_of
from saccade.errors import value_error

__all__ = ["Config", "Positive", "Probability", "Token"]

Positive = Annotated[float, {"above": 0}]
Probability = Annotated[float, {"least": 0, "below": 1}]
Token = Annotated[int, {"least": 0}]

_NUMBERS: dict[Any, Any] = {bool: flag, int: integer, float: number}


@dataclasses.dataclass(frozen=True)
class Config:
    """The base of the frozen dataclasses that hold a model's sizes: each field is checked by its annotation.

    An ``int`` is at least 1, a ``bool`` is True or False, a ``Literal`` one of its names; ``| None`` allows None.
    """

    vocab_size: int
    max_len: int
    embed_dim: int
    num_heads: int

    def __post_init__(self) -> None:
        where, hints = type(self).__name__, get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            object.__setattr__(self, field.name, _checked(where, field.name, given, hints[field.name]))
        if self.embed_dim % self.num_heads:
            raise value_error(where, "num_heads", f"divide embed_dim {self.embed_dim}", self.num_heads)


def _checked(where: str, name: str, value: Any, kind: Any) -> Any:
    """A value that is what its annotation says."""
    origin, inner = get_origin(kind), get_args(kind)
    if NoneType in inner:
        return None if value is None else _checked(where, name, value, inner[0])
    if origin is Literal:
        return one_of(where, name, value, inner)
    if origin is tuple:
        given = instance(where, name, value, tuple, "be a tuple of ints")
        return tuple(integer(where, name, one, None) for one in given)
    kind, limits = inner if origin is Annotated else (kind, {})
    if kind in _NUMBERS:
        return _NUMBERS[kind](where, name, value, **limits)
    return instance(where, name, value, kind, f"be a {kind.__name__} or None")
