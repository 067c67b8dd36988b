"""Synthetic tasks that test the memory of a model or a cache with questions about earlier tokens."""

from saccade.tasks.listops import listops
from saccade.tasks.needle import Needle, needle
from saccade.tasks.recall import IGNORED, Recall, induction, mqar, passkey, selective_copying

__all__ = ["Recall", "IGNORED", "passkey", "mqar", "induction", "selective_copying", "listops", "Needle", "needle"]
