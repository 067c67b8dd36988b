"""A peer: the attention of another library, the cases that it is tried on, and the definition it is compared with."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from saccade.masks import Dense
from saccade.testing.case import Case, Rule
from saccade.testing.cases import CASES
from saccade.testing.defined_case import Definition, with_definition
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws import Law
from saccade.testing.pattern_cases import PATTERNS

__all__ = ["Definition", "Library", "Peer", "imported", "kit_cases", "named", "ruled"]


def imported(module: str) -> Any:
    """Import a module of an optional package.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations of later torch versions
            return import_module(module)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{missing}; pip install 'saccade-attention[bench]'", name=missing.name) from missing


@cache
def kit_cases() -> tuple[Case, ...]:
    """Return the cases of `saccade.testing` without the patterns, which are like other masks as tensors."""
    return tuple(case for case in CASES if case not in PATTERNS)


def named(*names: str) -> tuple[Case, ...]:
    """Return the cases of `saccade.testing` with these names."""
    return tuple(case for case in CASES if case.name in names)


def ruled(name: str, rule: Rule, **sizes: int) -> Case:
    """Return a case whose mask is a function of plain integers."""
    alone = Case(name, None, rule, **sizes)  # type: ignore[arg-type]  # sizes are ints
    return dataclasses.replace(alone, mask=Dense(alone.allowed))


@dataclasses.dataclass(frozen=True)
class Peer:
    """The attention of another library.

    Attributes:
        call: the call, as a user writes it.
        function: the same in the calling convention of the kit; raises `NotImplementedError` for inputs that the
            library cannot express.
        with_lse: the same returning ``(out, lse)``, or None.
        gqa: accepts fewer key heads than query heads.
        gradients: has a backward pass.
        dtype: of the inputs; float32 for functions that always compute in float32.
        cases: returns the cases to try.
        definition: replaces softmax attention as the truth, if set.
        left_out: names of laws that do not apply.
    """

    call: str
    function: Callable[..., Tensor]
    with_lse: Callable[..., tuple[Tensor, Tensor]] | None = None
    gqa: bool = False
    gradients: bool = True
    dtype: torch.dtype = torch.float64
    cases: Callable[[], Sequence[Case]] = kit_cases
    definition: Definition | None = None
    left_out: Collection[str] = ()

    def __str__(self) -> str:
        return self.call

    def subject(self) -> Subject:
        """Return the peer as a function under test."""
        return Subject(self.function, with_lse=self.with_lse, gqa=self.gqa, gradients=self.gradients)

    def case_for(self, law: Law, case: Case) -> Case | None:
        """Return the case to try on the peer, or None if the law does not apply to it."""
        if law.name in self.left_out:
            return None
        return case if self.definition is None else with_definition(case, self.definition)


@dataclasses.dataclass(frozen=True)
class Library:
    """A package with the peers that come from it.

    Attributes:
        name: on the command line.
        package: its name on PyPI.
        peers: its functions under test.
    """

    name: str
    package: str
    peers: tuple[Peer, ...]

    @property
    def version(self) -> str:
        """The installed version, without the build suffix.

        Raises:
            PackageNotFoundError: it is not installed.
        """
        return version(self.package).partition("+")[0]
