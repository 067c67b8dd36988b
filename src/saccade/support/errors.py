"""Errors: exception classes, and functions that build their messages.

A message names the function, the argument, the rule and the received value. Facts (shapes) and a hint follow:

    attention: key heads must divide query heads; got 12 query heads and 5 key heads.
        query  [2, 12, 128, 64]  float32  cpu
        key    [2, 5, 128, 64]  float32  cpu
    Hint: ...

Tensor values never appear in a message, because reading them would wait for the device. External text (names in a file,
paths) may appear. Characters other than letters, marks and symbols are escaped, so that a message is safe to display.
"""

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from saccade.support.called_function import called_function

# The two zero-width joiners shape letters and emoji in ordinary text; other format characters can hide or reorder it.
_JOINERS = frozenset("\u200c\u200d")


class UnsupportedError(NotImplementedError):
    """Raised for a request that is not supported. ``reasons`` lists every reason, not only the first.

    Attributes:
        reasons: one sentence fragment for each reason; never empty.
    """

    def __init__(self, message: str, reasons: tuple[str, ...]):
        super().__init__(message)
        self.reasons = reasons


class ArgumentTypeError(TypeError, ValueError):
    """Raised for an argument of the wrong type. It is also a ``ValueError``, so one except clause catches both."""


def escaped(text: str) -> str:
    """Escape invisible characters and terminal control characters in text for an error message."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in _JOINERS else ascii(character)[1:-1] for character in text
    )


def describe(name: str, tensor: torch.Tensor) -> str:
    """Describe a tensor in one line of an error message: name, shape, dtype and device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name:<6} {list(tensor.shape)}  {dtype}  {tensor.device}"


def kind(value: object) -> str:
    """Return the name of a value's type for an error message, or "the class X" for a class."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def shown(value: object) -> str:
    """Format a value in one line of an error message. Long lists are shortened; tensors and arrays are not read."""
    return _SHORT.repr(value)


def value_error(
    argument: str, rule: str, got: object, *, facts: Sequence[str] = (), hint: str | None = None
) -> ValueError:
    """Return a ``ValueError`` whose first line reads ``{where}: {argument} must {rule}; got {got}.``"""
    return ValueError(_sentence(argument, rule, got, facts, hint))


def type_error(
    argument: str,
    rule: str,
    got: object,
    *,
    facts: Sequence[str] = (),
    hint: str | None = None,
    where: str | None = None,
) -> TypeError:
    """Return a ``TypeError`` whose first line reads ``{where}: {argument} must {rule}; got {got}.``

    Args:
        where: the function's name, for an error raised before the function runs. When None, it is read from the stack.
    """
    return ArgumentTypeError(_sentence(argument, rule, got, facts, hint, where))


def unsupported(what: str, reasons: Sequence[str], *, hint: str | None = None) -> UnsupportedError:
    """Return an `UnsupportedError` whose message says that ``what`` cannot run the inputs, and lists all reasons."""
    # A reason may span several lines, such as a printed module. One that needs no escapes remains a `Message`.
    safe = ["\n".join(map(escaped, reason.split("\n"))) for reason in reasons]
    reasons = tuple(reason if reason == text else text for reason, text in zip(reasons, safe, strict=True))
    lines = [
        f"{called_function()}: {escaped(what)} cannot run these inputs:",
        *(f"    - {reason}" for reason in reasons),
    ]
    if hint:
        lines.append(f"Hint: {escaped(hint)}")
    return UnsupportedError("\n".join(lines), reasons)


def hidden_by_vmap(name: str) -> UnsupportedError:
    """Return an `UnsupportedError` for a tensor whose values must be read but are hidden by `vmap`."""
    reason = f"the values of {name} are read before anything is computed, and vmap hides them"
    return unsupported("vmap", [reason], hint="put the mapped axis into the batch yourself")


def torchscript_unsupported() -> UnsupportedError:
    """Return an `UnsupportedError` for TorchScript, which ``torch.onnx.export(dynamo=False)`` uses as well."""
    reason = "TorchScript records operations for one length, but attention chooses different operations for each input"
    hint = "torch.export.export(model, args), or torch.onnx.export(model, args, dynamo=True)"
    return unsupported("TorchScript (torch.jit.trace, torch.onnx.export with dynamo=False)", [reason], hint=hint)


def missing_extra(package: str, extra: str) -> ImportError:
    """Return an ``ImportError`` that names the extra of saccade that installs a missing package."""
    hint = f"Hint: pip install 'saccade-attention[{extra}]'"
    return ImportError(f"{called_function()}: {package} must be installed; got no such package.\n{hint}", name=package)


def _sentence(
    argument: str, rule: str, got: object, facts: Sequence[str], hint: str | None, where: str | None = None
) -> str:
    lines = [
        f"{where or called_function(argument)}: {argument} must {rule}; got {got}.",
        *(f"    {fact}" for fact in facts),
    ]
    if hint:
        lines.append(f"Hint: {hint}")
    return "\n".join(map(escaped, lines))


class _ShortRepr(reprlib.Repr):
    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor | np.ndarray):
            noun = "tensor" if isinstance(x, torch.Tensor) else "array"
            return f"{noun} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        return kind(x) if isinstance(x, type) else " ".join(super().repr1(x, level).split())


_SHORT = _ShortRepr()
