"""Implementations with one mistake each, modelled on real ones: every law must catch some of them."""

from saccade.testing.mutants import wrong_conduct, wrong_declarations, wrong_masks, wrong_numbers, wrong_terms
from saccade.testing.mutants.mutant import Mutant, subject_of
from saccade.testing.mutants.stepwise import Stepwise

__all__ = ["MUTANTS", "Mutant", "Stepwise", "subject_of"]

MUTANTS: tuple[Mutant, ...] = (
    *wrong_masks.MUTANTS,
    *wrong_numbers.MUTANTS,
    *wrong_terms.MUTANTS,
    *wrong_conduct.MUTANTS,
    *wrong_declarations.MUTANTS,
)
