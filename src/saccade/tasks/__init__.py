"""Synthetic texts that ask for what stood earlier in them: tests of a model's or a cache's memory."""

from saccade.tasks.induction import induction
from saccade.tasks.mqar import mqar
from saccade.tasks.needle import Needle, needle
from saccade.tasks.passkey import passkey
from saccade.tasks.recall import IGNORED, Recall

__all__ = ["Recall", "IGNORED", "passkey", "mqar", "induction", "Needle", "needle"]
