"""Find the public function in which an error arises, so that a check needs no argument for its name.

The stack is read only when an error is raised: a call without an error costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch

__all__ = ["called_function"]

_ENTRIES = frozenset(("__init__", "__call__", "__new__", "__post_init__", "__init_subclass__", "forward"))


def called_function(argument: str = "") -> str:
    """Return the name of the public function or class whose code raises an error.

    For an argument, it is the innermost one, unless a public function further out, in the same call of the library, has
    a parameter of the argument's name: ``attention(mask=...)`` checks its mask by `saccade.masks.as_mask`, and is named
    itself. Without an argument it is the outermost one.

    Args:
        argument: the argument that is refused; its first word is compared with the names of parameters.
    """
    if torch.compiler.is_compiling():  # a compiler cannot trace the stack
        return "saccade"
    parameter = argument.partition(" ")[0].partition("[")[0].partition("=")[0]
    name = ""
    for frame in _library_frames():
        public = _public_name(frame)
        if public and (not name or not argument or parameter in frame.f_code.co_varnames[: _num_parameters(frame)]):
            name = public
    return name or "saccade"


def _library_frames() -> Iterator[FrameType]:
    """Yield the frames of the library's innermost call, from the inside out."""
    frame: FrameType | None = sys._getframe(2)
    started = False
    while frame is not None:
        is_ours = frame.f_globals.get("__name__", "").partition(".")[0] == "saccade"
        if started and not is_ours and not _is_transparent(frame):
            return
        if is_ours:
            started = started or bool(_public_name(frame))
            yield frame
        frame = frame.f_back


def _is_transparent(frame: FrameType) -> bool:
    """Return whether a frame only passes a call on: autograd, contextlib and functools."""
    return frame.f_globals.get("__name__", "").startswith(("torch.autograd.", "contextlib", "functools"))


def _num_parameters(frame: FrameType) -> int:
    return frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount


def _public_name(frame: FrameType) -> str:
    """Return the name under which users know a frame's function, or an empty string for a private one."""
    module = frame.f_globals["__name__"]
    first, *rest = frame.f_code.co_qualname.split(".")
    if not rest or rest[0] == "<locals>":
        return first if _is_exported(first, module) else ""
    receiver = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    kinds = (receiver if isinstance(receiver, type) else type(receiver)).__mro__
    if all(kind.__name__ != first for kind in kinds):  # a static method
        kinds = ()
    names = [kind.__name__ for kind in kinds if not kind.__name__.startswith("_")] or [first]
    if not any(_is_exported(name, module) for name in (*names, first)):
        return ""
    return names[0] if rest[0] in _ENTRIES or rest[0].startswith("_") else f"{names[0]}.{rest[0]}"


def _is_exported(name: str, module: str) -> bool:
    """Return whether a package above a module, or the module itself, exports a name."""
    if name.startswith("_"):
        return False
    parts = module.split(".")
    packages = (".".join(parts[:n]) for n in range(1, len(parts)))
    return any(name in getattr(sys.modules.get(package), "__all__", ()) for package in packages)
