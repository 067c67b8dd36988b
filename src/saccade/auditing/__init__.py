"""Whole models held against what is declared of them: which token reaches which, on whatever runs it."""

from saccade.auditing.audit import audit
from saccade.auditing.equivalence import Pair, sameness
from saccade.auditing.finding import Finding, Judged
from saccade.auditing.float64 import TrueFloat64
from saccade.auditing.reachability import Reach
from saccade.auditing.report import Report
from saccade.auditing.runner import Runner, Unanswered

__all__ = ["Finding", "Judged", "Pair", "Reach", "Report", "Runner", "TrueFloat64", "Unanswered", "audit", "sameness"]
