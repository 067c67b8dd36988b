"""Selection: which layers and heads are recorded."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from saccade.support.errors import type_error, value_error


class Selection:
    """Layers by number or name, heads by number.

    Args:
        layers: None for all; or numbers, counted in the order in which the layers speak, and names of modules, in
            which ``*`` stands for anything.
        heads: None for all; or numbers.
        where: the user's function, for error messages.

    Raises:
        TypeError, ValueError: something else; or nothing at all.
    """

    def __init__(self, layers: object, heads: object):
        chosen = _listed(layers, "layers", (int, str))
        self._numbers = None if chosen is None else {x for x in chosen if isinstance(x, int)}
        self._patterns = () if chosen is None else tuple(x for x in chosen if isinstance(x, str))
        numbers = _listed(heads, "heads", (int,))
        self.heads = None if numbers is None else tuple(int(x) for x in numbers)  # type: ignore[call-overload]
        if self.heads is not None and len(set(self.heads)) < len(self.heads):
            raise value_error("heads", "name each head once", list(self.heads))
        self._known: dict[str, int] = {}
        self._used: set[int | str] = set()

    def has_layer(self, name: str) -> bool:
        """Whether a layer is among the chosen ones; called with each layer in the order in which they speak."""
        number = self._known.setdefault(name, len(self._known))
        if self._numbers is None:
            return True
        patterns = [pattern for pattern in self._patterns if pattern == name or fnmatchcase(name, pattern)]
        self._used.update(patterns)
        if number in self._numbers:
            self._used.add(number)
        return number in self._numbers or bool(patterns)

    def may_mean(self, name: str) -> bool:
        """Whether a module that did not speak may be among the chosen ones: it would have had a number, too."""
        return self._numbers is None or bool(self._numbers) or any(fnmatchcase(name, one) for one in self._patterns)

    @property
    def heard(self) -> tuple[str, ...]:
        """Every layer that spoke, chosen or not."""
        return tuple(self._known)

    @property
    def unused(self) -> list[int | str]:
        """What was chosen, and never spoke."""
        wanted: list[int | str] = [*sorted(self._numbers or ()), *self._patterns]
        return [one for one in wanted if one not in self._used]


def _listed(given: object, name: str, kinds: tuple[type, ...]) -> list[object] | None:
    if given is None:
        return None
    listed = [given] if isinstance(given, int | str) else list(given) if isinstance(given, Iterable) else None
    words = " and ".join({int: "ints", str: "names"}[kind] for kind in kinds)
    if listed is None or not all(isinstance(x, kinds) and not isinstance(x, bool) for x in listed):
        raise type_error(name, f"be {words}, or None for all", repr(given))
    if not listed:
        raise value_error(name, "name at least one", "none", hint="None means all")
    if any(isinstance(x, int) and x < 0 for x in listed):
        raise value_error(name, "be at least 0", listed)
    return listed
