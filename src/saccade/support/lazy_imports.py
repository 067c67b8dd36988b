"""Names of a package that are imported when they are first asked for (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, which type checkers see as the imports that they stand for.

    Args:
        package: its ``__name__``.
        homes: names with spaces between, by the module of the package that they come from; a module that is asked for
            itself comes from nowhere else, and so stands below ``""``.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def found(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        home = home_of[name]
        thing = getattr(import_module(f"{package}.{home}"), name) if home else import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, thing)  # a second time it is there
        return thing

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return found, names
