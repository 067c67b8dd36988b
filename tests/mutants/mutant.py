"""Implementations with one mistake each, modelled on real ones: every law must catch some of them."""

import dataclasses

from tests.mutants import wrong_conduct, wrong_declarations, wrong_masks, wrong_numbers, wrong_terms

from saccade.testing import Claims, Stepwise, Subject


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An implementation that is wrong in exactly one way.

    Attributes:
        name: of the class that makes the mistake.
        mistake: one sentence about it.
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
        """Return the mutant as a function under test, as fresh as if just imported."""
        return subject_of(self.implementation())


def subject_of(implementation: Stepwise) -> Subject:
    """Return an implementation in steps as a function under test."""
    return Subject(
        implementation,
        with_lse=implementation.with_lse,
        offers=implementation.offers,
        reasons=implementation.reasons,
        claims=Claims(memory_exponent=1.0),
    )


MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(
        implementation.__name__,
        (implementation.__doc__ or "").splitlines()[0],
        implementation.caught_by,
        implementation,
    )
    for module in (wrong_masks, wrong_numbers, wrong_terms, wrong_conduct, wrong_declarations)
    for implementation in vars(module).values()
    if isinstance(implementation, type) and issubclass(implementation, Stepwise) and implementation.caught_by
)
"""A mutant for every class that names the laws against it; the first line of its docstring is the mistake."""
