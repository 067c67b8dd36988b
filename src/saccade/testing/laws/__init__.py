"""Laws that hold for every attention: each is a sentence and a function that tries to break it."""

from saccade.testing.laws import conduct, declarations, definition, invariance, locality
from saccade.testing.laws.expect import LawBroken
from saccade.testing.laws.law import Law

__all__ = ["LAWS", "Law", "LawBroken"]

LAWS: tuple[Law, ...] = (*definition.LAWS, *locality.LAWS, *invariance.LAWS, *conduct.LAWS, *declarations.LAWS)
