"""Check whole models, on any kernel, against a declared rule that says which tokens may influence which outputs."""

from saccade.auditing.audit import audit
from saccade.auditing.equivalence import Pair, check_equivalence
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.float64 import TrueFloat64
from saccade.auditing.reachability import Reach
from saccade.auditing.report import Report
from saccade.auditing.runner import Runner, Unanswered
from saccade.auditing.training_setup import audit_setup

__all__ = [
    "CounterExample",
    "ClaimResult",
    "Pair",
    "Reach",
    "Report",
    "Runner",
    "TrueFloat64",
    "Unanswered",
    "audit",
    "audit_setup",
    "check_equivalence",
]
