"""A mask as integers and tensors, for boundaries that objects do not cross (compiled and exported programs)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from saccade import masks
from saccade.masks.algebra import And, Not, Or
from saccade.masks.mask import Mask

__all__ = ["decode", "encode"]

_NOTHING, _BOOL, _INT, _TEXT, _TUPLE, _MASK, _TENSOR = range(7)


def encode(mask: Mask, classes: tuple[type[Mask], ...] = ()) -> tuple[list[int], list[Tensor]] | None:
    """The program of a mask and the tensors in it; None if it holds a function, or is of a class that is not known.

    Args:
        mask: any mask.
        classes: further classes, besides those of `saccade.masks`; `decode` wants the same.

    Example:
        >>> encode(masks.Causal() & masks.Window(2, 0))
        ([13, 4, 2, 5, 1, 5, 2, 2, 2, 2, 0], [])
    """
    program: list[int] = []
    tensors: list[Tensor] = []
    return (program, tensors) if _write_mask(mask, _known(classes), program, tensors) else None


def decode(program: Sequence[int], tensors: Sequence[Tensor], classes: tuple[type[Mask], ...] = ()) -> Mask:
    """The mask that was encoded."""
    if tensors:
        return _read_mask(iter(program), tensors, _known(classes))
    return _kept(tuple(program), classes)


@lru_cache(maxsize=64)
def _kept(program: tuple[int, ...], classes: tuple[type[Mask], ...]) -> Mask:
    return _read_mask(iter(program), (), _known(classes))


def _known(classes: tuple[type[Mask], ...]) -> tuple[type[Mask], ...]:
    """By number: ours from 0 on, the others from -1 down, so that a new one of ours leaves all numbers as they are."""
    return (*_CLASSES, *reversed(classes))


def _number(kind: type[Mask], known: tuple[type[Mask], ...]) -> int:
    place = known.index(kind)
    return place if place < len(_CLASSES) else place - len(known)


def _write_mask(mask: Mask, known: tuple[type[Mask], ...], program: list[int], tensors: list[Tensor]) -> bool:
    kind = type(mask)
    if kind not in known:
        return False
    program.append(_number(kind, known))
    fields: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    return all(_write(getattr(mask, name), known, program, tensors) for name in fields)


def _write(thing: Any, known: tuple[type[Mask], ...], program: list[int], tensors: list[Tensor]) -> bool:
    if thing is None:
        program.append(_NOTHING)
    elif isinstance(thing, bool):
        program.extend((_BOOL, int(thing)))
    elif isinstance(thing, int):
        program.extend((_INT, thing))
    elif isinstance(thing, str):
        program.extend((_TEXT, len(thing), *(ord(letter) for letter in thing)))
    elif isinstance(thing, tuple):
        program.extend((_TUPLE, len(thing)))
        return all(_write(part, known, program, tensors) for part in thing)
    elif isinstance(thing, Tensor):
        program.extend((_TENSOR, len(tensors)))
        tensors.append(thing)
    elif isinstance(thing, Mask):
        program.append(_MASK)
        return _write_mask(thing, known, program, tensors)
    else:
        return False
    return True


def _read_mask(program: Any, tensors: Sequence[Tensor], known: tuple[type[Mask], ...]) -> Mask:
    kind = known[next(program)]
    fields: tuple[str, ...] = kind.__match_args__
    return kind(*[_read(program, tensors, known) for _ in fields])


def _read(program: Any, tensors: Sequence[Tensor], known: tuple[type[Mask], ...]) -> Any:
    thing: Any
    match next(program):
        case 0:
            thing = None
        case 1:
            thing = bool(next(program))
        case 2:
            thing = next(program)
        case 3:
            thing = "".join(chr(next(program)) for _ in range(next(program)))
        case 4:
            thing = tuple([_read(program, tensors, known) for _ in range(next(program))])
        case 5:
            thing = _read_mask(program, tensors, known)
        case _:
            thing = tensors[next(program)]
    return thing


_CLASSES: tuple[type[Mask], ...] = (
    masks.Full,
    masks.Causal,
    masks.Window,
    masks.Global,
    masks.Strided,
    masks.Random,
    masks.Prefix,
    masks.Blocks,
    masks.Coarse,
    masks.Padding,
    masks.Documents,
    masks.Dense,
    Or,
    And,
    Not,
    masks.After,
    masks.Axial,
    masks.Neighborhood,
    masks.ShiftedWindows,
)
"""In this order for good: a program that was exported counts on it. New ones go to the end."""
