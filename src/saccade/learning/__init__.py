"""Training of small models that differ only in how they mix tokens, on recall tasks."""

from saccade.learning.mixers import MIXERS, Mixer
from saccade.learning.runs import Run, planned, run_all
from saccade.learning.task_presets import QUESTIONS, Question
from saccade.learning.training import SOLVED, Learner, Outcome, Settings, train

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
