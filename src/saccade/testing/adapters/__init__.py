"""Adapters that let `saccade.testing.check` and ``saccade judge`` test kernels with different calling conventions.

Each adapter takes a kernel with one calling convention and returns a `Form`: a function of ``(query, key, value,
mask)`` that calls the kernel. The form also lists the options that the kernel supports, and says why it cannot take
some inputs.
"""

from collections.abc import Callable

from saccade.testing.adapters.block_sparse import block_sparse
from saccade.testing.adapters.c_functions import c_function
from saccade.testing.adapters.calling_convention import Form
from saccade.testing.adapters.layouts import layout
from saccade.testing.adapters.operators import operator
from saccade.testing.adapters.paged import paged
from saccade.testing.adapters.recurrent import recurrent
from saccade.testing.adapters.score_mods import score_mod
from saccade.testing.adapters.triton_functions import triton_function
from saccade.testing.adapters.varlen import varlen

FORMS: dict[str, Callable[..., Form]] = {
    "layout": layout,
    "varlen": varlen,
    "paged": paged,
    "recurrent": recurrent,
    "block_sparse": block_sparse,
    "score_mod": score_mod,
    "operator": operator,
    "triton": triton_function,
    "c": c_function,
}
"""The adapters, by the name of the form in a declaration."""

__all__ = [
    "FORMS",
    "Form",
    "block_sparse",
    "c_function",
    "layout",
    "operator",
    "paged",
    "recurrent",
    "score_mod",
    "triton_function",
    "varlen",
]
