"""Somebody else's attention: how it is called, what it is tried on, and the library that it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor

from saccade.masks import Dense
from saccade.testing.case import Case, Rule
from saccade.testing.cases import CASES
from saccade.testing.laws import Law
from saccade.testing.pattern_cases import PATTERNS
from saccade.testing.peers.own_definition import Definition, own
from saccade.testing.subject import Subject

__all__ = ["Library", "Peer", "kit_cases", "named", "ruled"]


@cache
def kit_cases() -> tuple[Case, ...]:
    """The kit's cases; patterns are masks like others to a function that takes tensors."""
    return tuple(case for case in CASES if case not in PATTERNS)


def named(*names: str) -> tuple[Case, ...]:
    """The kit's cases of these names."""
    return tuple(case for case in CASES if case.name in names)


def ruled(name: str, rule: Rule, **sizes: int) -> Case:
    """A case whose mask is a rule in plain integers alone."""
    alone = Case(name, None, rule, **sizes)  # type: ignore[arg-type]  # sizes are ints
    return dataclasses.replace(alone, mask=Dense(alone.allowed))


@dataclasses.dataclass(frozen=True)
class Peer:
    """Somebody else's attention.

    Attributes:
        call: how it is called, as one writes it.
        function: the same in the kit's calling convention; for what cannot be said to it, it raises
            `NotImplementedError`.
        with_lse: the same returning ``(out, lse)``, if there is one.
        gqa: it takes fewer key heads than query heads.
        dtype: of the inputs; float32 for what computes in float32 whatever it is given.
        cases: what it is tried on.
        definition: what it is judged by, if it is no softmax attention.
        left_out: laws that say nothing about it.
    """

    call: str
    function: Callable[..., Tensor]
    with_lse: Callable[..., tuple[Tensor, Tensor]] | None = None
    gqa: bool = False
    dtype: torch.dtype = torch.float64
    cases: Callable[[], Sequence[Case]] = kit_cases
    definition: Definition | None = None
    left_out: Collection[str] = ()

    def __str__(self) -> str:
        return self.call

    def subject(self) -> Subject:
        """The peer as a function under test."""
        return Subject(self.function, with_lse=self.with_lse, gqa=self.gqa)

    def asked(self, law: Law, case: Case) -> Case | None:
        """A case as the peer is tried on it; None if the law says nothing about the peer."""
        if law.name in self.left_out:
            return None
        return case if self.definition is None else own(case, self.definition)


@dataclasses.dataclass(frozen=True)
class Library:
    """Where peers come from.

    Attributes:
        name: as it is called on a command line.
        package: what is installed.
        peers: what is tried of it.
    """

    name: str
    package: str
    peers: tuple[Peer, ...]

    @property
    def version(self) -> str:
        """The version that is installed, without its build.

        Raises:
            PackageNotFoundError: it is not installed.
        """
        return version(self.package).partition("+")[0]
