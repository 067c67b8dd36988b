"""The laws that hold for every attention: each is a statement, and a function that looks for a counter-example."""

from saccade.testing.laws import conduct, declarations, definition, invariance, locality
from saccade.testing.laws.expect import LawBroken
from saccade.testing.laws.law import Law

__all__ = ["LAWS", "Law", "LawBroken"]

LAWS: tuple[Law, ...] = (*definition.LAWS, *locality.LAWS, *invariance.LAWS, *conduct.LAWS, *declarations.LAWS)
