"""Whole models held against what is declared of them: which token reaches which, on whatever runs it."""

from saccade.auditing.audit import audit
from saccade.auditing.finding import Finding, Judged
from saccade.auditing.reach import Reach
from saccade.auditing.report import Report

__all__ = ["Finding", "Judged", "Reach", "Report", "audit"]
