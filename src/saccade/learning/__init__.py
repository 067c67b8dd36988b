"""Training of small models that differ only in the mixer of tokens, on tasks of recall."""

from saccade.learning.learner import Learner
from saccade.learning.mixers import MIXERS, Mixer
from saccade.learning.runs import Run, planned, run_all
from saccade.learning.task_presets import QUESTIONS, Question
from saccade.learning.training import SOLVED, Outcome, Settings, train

__all__ = [
    "MIXERS",
    "Mixer",
    "QUESTIONS",
    "Question",
    "Learner",
    "Settings",
    "SOLVED",
    "train",
    "Outcome",
    "Run",
    "planned",
    "run_all",
]
