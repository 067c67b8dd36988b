"""Implementations with one mistake each, modelled on real ones: every law must catch some of them."""

from saccade.testing.mutants import wrong_conduct, wrong_declarations, wrong_masks, wrong_numbers, wrong_terms
from saccade.testing.mutants.mutant import Mutant, subject_of
from saccade.testing.mutants.stepwise import Stepwise

__all__ = ["MUTANTS", "Mutant", "Stepwise", "subject_of"]

MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(made.__name__, (made.__doc__ or "").splitlines()[0], made.caught_by, made)
    for module in (wrong_masks, wrong_numbers, wrong_terms, wrong_conduct, wrong_declarations)
    for made in vars(module).values()
    if isinstance(made, type) and issubclass(made, Stepwise) and made.caught_by
)
"""A mutant for every class that names the laws against it; the first line of its docstring is the mistake."""
