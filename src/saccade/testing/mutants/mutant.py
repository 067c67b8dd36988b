"""What a mutant is: an implementation with one mistake, and the laws that must notice."""

from __future__ import annotations

import dataclasses

from saccade.testing.mutants.stepwise import Stepwise
from saccade.testing.subject import Claims, Subject

__all__ = ["Mutant", "subject_of"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An implementation that is wrong in exactly one way.

    Attributes:
        name: of the class that makes the mistake.
        mistake: what it does, in one sentence.
        caught_by: names of laws, each of which must break on some case.
        implementation: the class.
    """

    name: str
    mistake: str
    caught_by: tuple[str, ...]
    implementation: type[Stepwise]

    def __str__(self) -> str:
        return self.name

    def subject(self) -> Subject:
        """The mutant as a function under test, as fresh as if just imported."""
        return subject_of(self.implementation())


def subject_of(implementation: Stepwise) -> Subject:
    """An implementation in steps as a function under test."""
    return Subject(
        implementation,
        with_lse=implementation.with_lse,
        offers=implementation.offers,
        reasons=implementation.reasons,
        claims=Claims(memory_exponent=1.0),
    )
