"""Give a module a new ``forward`` by changing its class to a subclass; the module stays the same object."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class SwappedClass(nn.Module):
    """Base class for classes that `swap_class` combines with a module's class.

    The module remains the same object, so ``isinstance``, parameters, buffers, hooks, attributes and references to it
    are unaffected.
    """

    swapped_from: ClassVar[tuple[type[Any], type[Any]]]
    keeps_name: ClassVar[bool] = False  # whether the combined class is named after the module's class

    def __getattr__(self, name: str) -> Any:  # attributes of the module's original class
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the module by reference to the two classes that its class combines."""
        if "swapped_from" not in vars(type(self)):  # a further subclass
            return super().__reduce_ex__(protocol)
        reduced = super().__reduce_ex__(protocol)
        assert not isinstance(reduced, str)  # a str would name a global variable, which is never a module
        return (_blank, type(self).swapped_from, *reduced[2:])


_classes: dict[Any, type[SwappedClass]] = {}


def swap_class(module: nn.Module, kind: type[SwappedClass]) -> None:
    """Change a module's class in place to a combination of its class and ``kind``, which has the new ``forward``."""
    module.__class__ = _class_of(kind, type(module))


def swap_back(module: nn.Module) -> None:
    """Restore a module's original class, undoing `swap_class`."""
    module.__class__ = type(module).swapped_from[1]  # type: ignore[attr-defined]


def _class_of(kind: type[SwappedClass], before: type[nn.Module]) -> type[SwappedClass]:
    if (kind, before) not in _classes:
        named = before if kind.keeps_name else kind
        names = {"__module__": named.__module__, "__doc__": named.__doc__, "swapped_from": (kind, before)}
        _classes.setdefault((kind, before), type(named.__name__, (kind, before), names))
    return _classes[kind, before]


def _blank(kind: type[SwappedClass], before: type[nn.Module]) -> SwappedClass:
    subclass = _class_of(kind, before)
    module: SwappedClass = subclass.__new__(subclass)
    return module
