"""Audit every language model of the installed transformers, small and with random weights."""

from saccade.auditing.survey.architectures import Architecture, architectures
from saccade.auditing.survey.result import Broken, Cell, measure

__all__ = ["Architecture", "Broken", "Cell", "architectures", "measure"]
