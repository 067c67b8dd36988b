"""Serialise masks and score functions as integers and tensors, for compiled and exported programs.

An object is written as the name of its class followed by its fields. On reading, the name is looked up first among the
classes that this process has written, then in the module given by the name. Only modules of saccade are imported for
this purpose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import operator
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from saccade import masks
from saccade.masks.convert.deferred_masks import Converted, Shape, Unread
from saccade.masks.mask import Mask
from saccade.support.errors import unsupported

_NOTHING, _BOOL, _INT, _FLOAT, _TEXT, _TUPLE, _TENSOR, _VALUE, _FUNCTION = range(9)
_CHUNK_BYTES = 7  # bytes of a string packed into one integer

_registry: dict[str, Any] = {}


def encode(thing: object) -> tuple[list[int], list[Tensor]] | None:
    """Serialise a mask or a function as a list of ints and a list of tensors; return None if that is impossible.

    Supported objects are functions without closure variables, and frozen dataclasses whose fields are numbers, strings,
    tensors, tuples, None or frozen dataclasses. Masks that call functions are not supported, because the functions may
    return different results in another call.

    Example:
        >>> program, tensors = encode(masks.Causal() & masks.Window(2, 0))
        >>> decode(program, tensors)
        Causal() & Window(left=2, right=0)
    """
    program: list[int] = []
    tensors: list[Tensor] = []
    return (program, tensors) if _write(thing, program, tensors) else None


def decode(program: Sequence[int], tensors: Sequence[Tensor], shape: Shape = (1, 1, 1, 1)) -> Any:
    """Return the mask or function that `encode` serialised. Tensor values that a mask depends on are read now.

    Args:
        program, tensors: the results of `encode`.
        shape: (batch, heads, q_len, kv_len) of the attention.

    Raises:
        UnsupportedError: a class or function is not defined in this process.
    """
    return _read(iter(program), tensors, shape) if tensors else _cached(tuple(program), shape)


@lru_cache(maxsize=64)
def _cached(program: tuple[int, ...], shape: Shape) -> Any:
    return _read(iter(program), (), shape)


def _write(thing: Any, program: list[int], tensors: list[Tensor]) -> bool:
    if thing is None:
        program.append(_NOTHING)
    elif isinstance(thing, bool):
        program.extend((_BOOL, int(thing)))
    elif isinstance(thing, int | torch.SymInt):
        program += [_INT, thing]  # type: ignore[list-item]  # a symbol while tracing
    elif isinstance(thing, float):
        program.extend((_FLOAT, *_packed(repr(thing))))
    elif isinstance(thing, str):
        program.extend((_TEXT, *_packed(thing)))
    elif isinstance(thing, Tensor):
        program.extend((_TENSOR, len(tensors)))
        tensors.append(thing)
    elif isinstance(thing, tuple):
        program.extend((_TUPLE, len(thing)))
        return all(_write(part, program, tensors) for part in thing)
    else:
        thing = _with_tables(thing)
        is_function = isinstance(thing, FunctionType)
        if thing.__code__.co_freevars if is_function else isinstance(thing, Mask) and thing.calls_functions:
            return False
        address = _address(thing if is_function else type(thing))
        if address is None:
            return False
        program.extend((_FUNCTION if is_function else _VALUE, *_packed(address[0])))
        return all(_write(getattr(thing, name), program, tensors) for name in address[1:])
    return True


def _with_tables(thing: Any) -> Any:
    """Replace a `Padding` or `Documents` mask by one that stores its lengths as a tensor, so that they may change."""
    if isinstance(thing, masks.Padding):
        return Converted("Padding", thing.table)
    return Converted("Documents", thing.table, thing.rule) if isinstance(thing, masks.Documents) else thing


def _read(program: Iterator[int], tensors: Sequence[Tensor], shape: Shape) -> Any:
    tag = next(program)
    if tag == _TUPLE:
        return tuple([_read(program, tensors, shape) for _ in range(next(program))])
    if tag in (_FLOAT, _TEXT):
        text = _unpacked(program)
        return text if tag == _TEXT else float(text)
    if tag in (_VALUE, _FUNCTION):
        thing, *names = _lookup(_unpacked(program))
        if tag == _FUNCTION:
            return thing
        value = thing(**{name: _read(program, tensors, shape) for name in names})
        return value.read(shape) if isinstance(value, Unread) else value
    if tag == _NOTHING:
        return None
    number = next(program)
    return tensors[number] if tag == _TENSOR else bool(number) if tag == _BOOL else number


def _address(thing: Any) -> tuple[str, ...] | None:
    """Return the serialised name of a class or function, then the fields of a class; None for unsupported objects."""
    fields = _fields(thing)
    if fields is None:
        return None
    is_ours = getattr(masks, thing.__name__, None) is thing
    name = thing.__name__ if is_ours else f"{thing.__module__}:{thing.__qualname__}"
    while _registry.setdefault(name, thing) is not thing:  # redefined, for example in a notebook cell
        name += "'"
    return name, *fields


# Mark the function as constant for Dynamo manually, because the decorator would import torch._dynamo.
_address._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fields(thing: Any) -> tuple[str, ...] | None:
    """Return the fields to serialise: names for a frozen dataclass, () for a function, None for anything else."""
    if isinstance(thing, FunctionType):
        return ()
    parameters = getattr(thing, "__dataclass_params__", None)
    is_frozen = isinstance(thing, type) and parameters is not None and parameters.frozen
    return tuple(field.name for field in dataclasses.fields(thing) if field.init) if is_frozen else None


def _lookup(name: str) -> tuple[Any, ...]:
    """Return the class or function with a serialised name, then the field names of a class."""
    module, _, path = name.rpartition(":")
    thing = _registry.get(name)
    if thing is None:
        if module.startswith("saccade."):  # a program exported by another process
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        with contextlib.suppress(KeyError, AttributeError):
            thing = operator.attrgetter(path)(sys.modules[module or "saccade.masks"])
    fields = _fields(thing)
    if fields is None:
        reason = f"it uses {path} of {module or 'saccade.masks'}, which is not defined in this process"
        raise unsupported("the program", [reason], hint="import that module before the program runs")
    return thing, *fields


def _packed(text: str) -> list[int]:
    """Serialise a string as integers, preceded by their count."""
    encoded = text.encode()
    parts = [encoded[start : start + _CHUNK_BYTES] for start in range(0, len(encoded), _CHUNK_BYTES)]
    # A leading 1 preserves leading zeros.
    return [len(parts), *(int.from_bytes(b"\x01" + part, "big") for part in parts)]


def _unpacked(program: Iterator[int]) -> str:
    """Deserialise a string from the integers that `_packed` returned."""
    parts = [next(program) for _ in range(next(program))]
    return b"".join(part.to_bytes(8, "big").lstrip(b"\x00")[1:] for part in parts).decode()
