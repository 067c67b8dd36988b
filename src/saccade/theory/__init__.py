"""Claims about attention, each with a verdict and with measurements that can contradict it."""

from saccade.theory.claim import Claim, Verdict
from saccade.theory.claims import CLAIMS, find
from saccade.theory.common_mistakes import MISTAKES, Mistake
from saccade.theory.measurement import Measurement
from saccade.theory.verification import Finding, Verification, verify

__all__ = [
    "CLAIMS",
    "MISTAKES",
    "Claim",
    "Finding",
    "Measurement",
    "Mistake",
    "Verdict",
    "Verification",
    "find",
    "verify",
]
