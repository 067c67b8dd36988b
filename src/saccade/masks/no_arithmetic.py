"""What a mask is not: a number. It says who may attend to whom, and what is added to scores is a bias."""

from __future__ import annotations

from typing import Any, NoReturn

from saccade.support.errors import type_error

__all__ = ["NoArithmetic"]


class NoArithmetic:
    """Refuses ``+``, ``-``, ``*``, ``/``, ``@``, ``and``, ``or``, ``not`` and ``len`` with the word that was meant."""

    def _refuse(self, other: object) -> NoReturn:
        hint = "masks join by & (both), | (either) and ~ (not); what is added to scores goes to bias="
        raise type_error("a mask", "not be counted with", self, hint=hint)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __rmatmul__ = _refuse
    __rpow__ = _refuse

    def __bool__(self) -> NoReturn:
        hint = "masks join by & (both), | (either) and ~ (not); with `and`, `or` and `not` one of them would be lost"
        raise type_error("a mask", "not be used as true or false", self, hint=hint)

    def __len__(self) -> NoReturn:
        hint = "mask.picture(n) draws it for n tokens, mask.density(n) counts, mask.to_dense(n) writes it out"
        raise type_error("a mask", "not be asked for a length: it is a rule on positions", self, hint=hint)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        hint = "mask.to_dense(n)[0, 0].numpy() writes it out for n tokens"
        raise type_error("a mask", "not be an array: it is a rule on positions", self, hint=hint)
