"""Synthetic tasks whose questions are about earlier tokens, to test the memory of a model or a cache."""

from saccade.tasks.listops import listops
from saccade.tasks.needle import Needle, needle
from saccade.tasks.recall import IGNORED, Recall, induction, mqar, passkey, selective_copying

__all__ = ["Recall", "IGNORED", "passkey", "mqar", "induction", "selective_copying", "listops", "Needle", "needle"]
