"""Synthetic texts that ask for what stood earlier in them: tests of a model's or a cache's memory."""

from saccade.tasks.listops import listops
from saccade.tasks.needle import Needle, needle
from saccade.tasks.recall import IGNORED, Recall, induction, mqar, passkey
from saccade.tasks.selective_copying import selective_copying

__all__ = ["Recall", "IGNORED", "passkey", "mqar", "induction", "selective_copying", "listops", "Needle", "needle"]
