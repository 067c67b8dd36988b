"""Texts made from a seed, in which what is asked for stands somewhere else: what a memory is tried on."""

from saccade.tasks.induction import induction
from saccade.tasks.mqar import mqar
from saccade.tasks.needle import Needle, needle
from saccade.tasks.passkey import passkey
from saccade.tasks.recall import IGNORED, Recall

__all__ = ["Recall", "IGNORED", "passkey", "mqar", "induction", "Needle", "needle"]
