"""The laws that attention functions must satisfy: statements with functions that look for counter-examples."""

from saccade.testing.laws import (
    buffers,
    declarations,
    definition,
    global_state,
    invariance,
    locality,
    program_behaviour,
    repeated_calls,
    sizes,
    unusual_values,
)
from saccade.testing.laws.expect import LawBroken
from saccade.testing.laws.law import Law

__all__ = ["LAWS", "SIZE_LAWS", "Law", "LawBroken"]

LAWS: tuple[Law, ...] = (
    *definition.LAWS,
    *locality.LAWS,
    *invariance.LAWS,
    *program_behaviour.LAWS,
    *declarations.LAWS,
)

SIZE_LAWS: tuple[Law, ...] = (
    *sizes.LAWS,
    *unusual_values.LAWS,
    *buffers.LAWS,
    *repeated_calls.LAWS,
    *global_state.LAWS,
)
"""Laws at the sizes of real models, with their own cases."""
