"""Tokens as a person reads them: words put together from pieces, and labels that are safe to show."""

from saccade.text.labels import shorten, visible
from saccade.text.merging import merge
from saccade.text.reading import Word, words
from saccade.text.spelling import spelled

__all__ = ["Word", "words", "merge", "visible", "shorten", "spelled"]
