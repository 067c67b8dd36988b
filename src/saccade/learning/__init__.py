"""Train small models on recall tasks to compare token mixers; the models differ only in their mixers."""

from saccade.learning.mixers import MIXERS, Mixer
from saccade.learning.quality import Quality, quality_on
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
    "Quality",
    "quality_on",
    "planned",
    "run_all",
]
