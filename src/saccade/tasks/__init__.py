"""Synthetic texts that ask for what stood earlier in them: tests of a model's or a cache's memory."""

from saccade.tasks.needle import Needle, needle
from saccade.tasks.recall import IGNORED, Recall, induction, mqar, passkey

__all__ = ["Recall", "IGNORED", "passkey", "mqar", "induction", "Needle", "needle"]
