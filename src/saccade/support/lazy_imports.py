"""Lazy imports: names of a package that are imported on first access (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from saccade.support.name_hints import no_attribute


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package with lazy imports. Type checkers see ordinary imports.

    Args:
        package: the ``__name__`` of the package.
        homes: a mapping from each module to the names that it defines, separated by spaces; the key ``""`` lists
            submodules.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            raise no_attribute(package, name)
        home = home_of[name]
        value = getattr(import_module(f"{package}.{home}"), name) if home else import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, value)  # later accesses bypass this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return load, names
