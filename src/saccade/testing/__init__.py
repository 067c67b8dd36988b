"""Conformance tests for any attention function: ``print(testing.check(function))``.

A law is a statement about attention with a function that looks for a counter-example. A case consists of a mask, sizes
and options. The module ``oracle`` contains the reference definition of attention, and the module ``definitions``
contains the reference definitions of scores and relative biases.
"""

from saccade.engine.first_use_check import FirstUse
from saccade.testing import adapters, definitions, oracle
from saccade.testing.assert_reach import assert_reach
from saccade.testing.case import Case, Inputs
from saccade.testing.cases import CASES, LARGE_CASES
from saccade.testing.conformance import check, trials, try_law
from saccade.testing.first_use import first_use
from saccade.testing.kernel_under_test import Claims, Subject
from saccade.testing.laws import LAWS, SIZE_LAWS, Law, LawBroken
from saccade.testing.problem import Problem
from saccade.testing.report import Report, Result
from saccade.testing.size_cases import SIZE_CASES
from saccade.testing.stepwise_attention import Stepwise
from saccade.testing.tolerances import TOLERANCES, Tolerance, error, tolerance

__all__ = [
    "check",
    "Report",
    "Result",
    "LAWS",
    "SIZE_LAWS",
    "Law",
    "LawBroken",
    "CASES",
    "LARGE_CASES",
    "SIZE_CASES",
    "Case",
    "Inputs",
    "Problem",
    "Subject",
    "Claims",
    "trials",
    "try_law",
    "Stepwise",
    "TOLERANCES",
    "Tolerance",
    "tolerance",
    "error",
    "adapters",
    "definitions",
    "oracle",
    "assert_reach",
    "first_use",
    "FirstUse",
]
