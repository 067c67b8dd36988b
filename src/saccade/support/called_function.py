"""Find the public function that raises an error, so that the error message can name it.

The stack is read only when an error is built, so a call without an error costs nothing, and checks need no parameter
for the name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType

import torch

_ENTRIES = frozenset(("__init__", "__call__", "__new__", "__post_init__", "__init_subclass__", "forward"))
# Modules whose frames only forward a call.
_TRANSPARENT = ("torch.autograd.", "contextlib", "functools")


def called_function(argument: str = "") -> str:
    """Return the name of the public function or class whose call raises an error.

    It is the outermost public function of the library on the stack that has a parameter with the argument's name. If
    there is none, it is the outermost public function. For example, an error of ``attention(mask=...)`` names
    `attention`, although `saccade.masks.as_mask` checks the mask. If ``streaming(...)`` builds a window with a wrong
    ``left``, the error names `Window`. Code that runs in a hook or a command has no public function on its stack, so
    its module defines the name as ``CALLED_AS``.

    Args:
        argument: the rejected argument. Its first word is the name of a parameter.
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace the stack
        return "saccade"
    parameter = argument.partition(" ")[0].partition("[")[0].partition("=")[0]
    outermost = match = fallback = ""
    for frame, receiver, name in _library_frames():
        fallback = fallback or frame.f_globals.get("CALLED_AS", "")
        if name:
            outermost = name
            if parameter in _parameters(frame):
                match = name
            elif parameter and receiver is not None and parameter in inspect.signature(receiver).parameters:
                match = receiver.__name__
    return match or outermost or fallback or "saccade"


def _library_frames() -> Iterator[tuple[FrameType, type | None, str]]:
    """Yield stack frames with receivers and public names, up to the caller's code, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    is_inside = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] == "saccade":
            receiver = _receiver(frame)
            name = _public_name(frame, receiver)
            is_inside = is_inside or bool(name)
            yield frame, receiver, name
        elif is_inside and not module.startswith(_TRANSPARENT):
            return
        frame = frame.f_back


def _parameters(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    several = bool(code.co_flags & inspect.CO_VARARGS)  # the name of *args comes last
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + several]


def _receiver(frame: FrameType) -> type | None:
    """Return the public class of the object whose method runs in a stack frame; None if a function runs there."""
    first, *rest = frame.f_code.co_qualname.split(".")
    if not rest or rest[0] == "<locals>" or not frame.f_code.co_argcount:
        return None
    receiver = frame.f_locals.get(frame.f_code.co_varnames[0])
    kinds = (receiver if isinstance(receiver, type) else type(receiver)).__mro__
    if all(kind.__name__ != first for kind in kinds):  # a static method
        return None
    return next((kind for kind in kinds if not kind.__name__.startswith("_")), None)


def _public_name(frame: FrameType, receiver: type | None) -> str:
    """Return the public name of the function that runs in a stack frame; an empty string if it is private."""
    module = frame.f_globals["__name__"]
    first, *rest = frame.f_code.co_qualname.split(".")
    owners = (first,) if receiver is None else tuple(kind.__name__ for kind in receiver.__mro__)
    if not any(_is_exported(name, module) for name in owners):
        return ""
    owner = first if receiver is None else receiver.__name__
    is_private = bool(rest) and rest[0].startswith("_") and rest[0] not in _ENTRIES
    if is_private and receiver is not None and _is_internal(receiver):  # the user knows neither name
        return ""
    is_whole = not rest or rest[0] in _ENTRIES or rest[0].startswith(("_", "<"))
    return owner if is_whole else f"{owner}.{rest[0]}"


def _is_internal(kind: type) -> bool:
    """Return whether a class belongs to the library and is not exported."""
    module = kind.__module__
    return module.partition(".")[0] == "saccade" and not _is_exported(kind.__name__, module)


def _is_exported(name: str, module: str) -> bool:
    """Return whether a module, or a package that contains it, exports a name in ``__all__``."""
    if name.startswith("_"):
        return False
    parts = module.split(".")
    packages = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return any(name in getattr(sys.modules.get(package), "__all__", ()) for package in packages)
