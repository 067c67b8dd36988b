"""Audit every language model of the installed transformers, small and with random weights."""

from benchmarks.survey.architectures import Architecture, architectures
from benchmarks.survey.result import Broken, Cell, measure

__all__ = ["Architecture", "Broken", "Cell", "architectures", "measure"]
