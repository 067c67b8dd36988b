"""Implementations with one mistake each, modelled on real ones: every law must catch some of them."""

import dataclasses

from saccade.testing.mutants import wrong_conduct, wrong_declarations, wrong_masks, wrong_numbers, wrong_terms
from saccade.testing.mutants.stepwise import Stepwise
from saccade.testing.subject import Claims, Subject

__all__ = ["MUTANTS", "Mutant", "Stepwise", "subject_of"]


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


MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(made.__name__, (made.__doc__ or "").splitlines()[0], made.caught_by, made)
    for module in (wrong_masks, wrong_numbers, wrong_terms, wrong_conduct, wrong_declarations)
    for made in vars(module).values()
    if isinstance(made, type) and issubclass(made, Stepwise) and made.caught_by
)
"""A mutant for every class that names the laws against it; the first line of its docstring is the mistake."""
